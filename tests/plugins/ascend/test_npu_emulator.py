"""The emulated operators refuse what the real ones refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.ascend.npu_kernels import causal_mask
from attnmux.emulators.ascend import KERNELS

MASK = causal_mask(torch.device("cpu"))


def rows(count: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, heads, dim).to(dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """A prefill of two requests over pages."""
    given: dict[str, Any] = {
        "query": rows(5, 4, 128),
        "key": rows(3, 128, 256),
        "value": rows(3, 128, 256),
        "actual_seq_qlen": [2, 5],
        "actual_seq_kvlen": [130, 3],
        "block_table": torch.tensor([[1, 2], [2, 0]], dtype=torch.int32),
        "block_size": 128,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "softmax_scale": 0.1,
        "input_layout": "TND",
        "atten_mask": MASK,
        "sparse_mode": 3,
        "return_softmax_lse": True,
    }
    return {**given, **changes}


def latents(**changes: Any) -> dict[str, Any]:
    """A prefill of one request over latents."""
    cache = rows(2, 16, 512)
    given: dict[str, Any] = {
        "query": rows(3, 4, 512),
        "key": cache,
        "value": cache,
        "query_rope": rows(3, 4, 64),
        "key_rope": rows(2, 16, 64),
        "actual_seq_qlen": [3],
        "actual_seq_kvlen": [20],
        "block_table": torch.tensor([[1, 0]], dtype=torch.int32),
        "block_size": 16,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "input_layout": "TND",
        "atten_mask": MASK,
        "sparse_mode": 3,
    }
    return {**given, **changes}


def test_results_and_their_lse() -> None:
    """A query of the second request, by hand."""
    given = arguments()
    out, lse = KERNELS.fused_infer_attention_score(**given)
    assert out.shape == (5, 4, 128)
    assert lse.shape == (5, 4, 1)
    k = given["key"][2, :2].view(2, 2, 128)[:, 1].float()
    v = given["value"][2, :2].view(2, 2, 128)[:, 1].float()
    logits = k @ given["query"][3, 3].float() * 0.1
    torch.testing.assert_close(lse[3, 3, 0], logits.logsumexp(0))
    torch.testing.assert_close(out[3, 3].float(), logits.softmax(0) @ v, atol=1e-2, rtol=1e-2)


def test_without_a_mask_each_query_sees_all_keys() -> None:
    given = arguments()
    causal, _ = KERNELS.fused_infer_attention_score(**given)
    whole, _ = KERNELS.fused_infer_attention_score(
        **{**given, "atten_mask": None, "sparse_mode": 0}
    )
    assert torch.equal(causal[[1, 4]], whole[[1, 4]])
    assert not torch.equal(causal[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"no_such": 1}, "no_such"),
        ({"input_layout": "BSH"}, "layout"),
        ({"atten_mask": None}, "should not be null"),
        ({"atten_mask": ~MASK}, "upper triangle"),
        ({"atten_mask": MASK[:5, :5].contiguous()}, "2048"),
        ({"sparse_mode": 4, "pre_tokens": 3}, "not emulated"),
        ({"actual_seq_qlen": [2, 4]}, "T should be equal"),
        ({"actual_seq_qlen": [3, 2]}, "less than the one before"),
        ({"actual_seq_kvlen": [130]}, "for each batch"),
        ({"actual_seq_kvlen": [300, 3]}, "too narrow"),
        ({"actual_seq_kvlen": [1, 3]}, "more queries than keys"),
        ({"actual_seq_kvlen": [130, 0]}, "queries without keys"),
        ({"actual_seq_kvlen": None}, "should not be null"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "int32"),
        ({"block_size": 64}, "blocksize"),
        ({"query": rows(5, 4, 256)[..., ::2]}, "non-contiguous"),
        ({"query": rows(5, 4, 128, torch.float16)}, "dtype"),
        ({"query": rows(5, 4, 96)}, "D of query"),
        ({"num_key_value_heads": 4}, "D of query"),
        ({"learnable_sink": torch.zeros(4)}, "bfloat16"),
    ],
)
def test_what_the_operator_refuses(changes, match) -> None:
    with pytest.raises(RuntimeError, match=match):
        KERNELS.fused_infer_attention_score(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"value": rows(2, 16, 512)}, "512"),
        ({"query_rope": None}, "go together"),
        ({"block_size": 8}, "blocksize"),
        ({"block_table": None, "actual_seq_kvlen": [20]}, "T, N, D"),
        ({"return_softmax_lse": True}, "not with rope"),
        ({"query": rows(3, 3, 512), "query_rope": rows(3, 3, 64), "num_query_heads": 3}, "Q_N 3"),
        (
            {
                "query": rows(17, 4, 512),
                "query_rope": rows(17, 4, 64),
                "actual_seq_qlen": [17],
            },
            "1 to 16",
        ),
    ],
)
def test_latents_that_the_operator_refuses(changes, match) -> None:
    KERNELS.fused_infer_attention_score(**latents())
    with pytest.raises(RuntimeError, match=match):
        KERNELS.fused_infer_attention_score(**latents(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"context_lens": torch.tensor([20], dtype=torch.int64)}, "int32"),
        ({"context_lens": torch.tensor([40], dtype=torch.int32)}, "too narrow"),
        ({"context_lens": torch.tensor([0], dtype=torch.int32)}, "without keys"),
        ({"key_cache": rows(2, 24, 576).unsqueeze(2)}, "multiple of 16"),
        ({"num_heads": 8}, "heads"),
        ({"out": rows(1, 4, 576)}, "out"),
    ],
)
def test_what_paged_attention_refuses(changes, match) -> None:
    given: dict[str, Any] = {
        "query": rows(1, 4, 576),
        "key_cache": rows(2, 16, 576).unsqueeze(2),
        "num_kv_heads": 1,
        "num_heads": 4,
        "scale_value": 0.1,
        "block_table": torch.tensor([[1, 0]], dtype=torch.int32),
        "context_lens": torch.tensor([20], dtype=torch.int32),
        "mla_vheadsize": 512,
        "out": rows(1, 4, 512),
    }
    KERNELS.paged_attention_mla(**given)
    with pytest.raises(RuntimeError, match=match):
        KERNELS.paged_attention_mla(**{**given, **changes})
