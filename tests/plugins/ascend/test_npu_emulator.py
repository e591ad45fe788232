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


def ring(**changes: Any) -> dict[str, Any]:
    """The new tokens of two requests, which see each other causally."""
    given: dict[str, Any] = {
        "q_nope": rows(5, 4, 128),
        "q_rope": rows(5, 4, 64),
        "k_nope": rows(5, 4, 128),
        "k_rope": rows(5, 4, 64),
        "value": rows(5, 4, 128),
        "mask": torch.ones(512, 512, dtype=torch.bfloat16).triu(1),
        "seqlen": torch.tensor([2, 3], dtype=torch.int32),
        "head_num": 4,
        "kv_head_num": 4,
        "qk_scale": 0.1,
        "kernel_type": "kernel_type_high_precision",
        "mask_type": "mask_type_triu",
        "input_layout": "type_bsnd",
        "calc_type": "calc_type_first_ring",
    }
    return {**given, **changes}


def prefix(**changes: Any) -> dict[str, Any]:
    """Seven further keys, three of the first request and four of the second."""
    out, lse = KERNELS.ring_mla(**ring())
    given = ring(
        k_nope=rows(7, 4, 128),
        k_rope=rows(7, 4, 64),
        value=rows(7, 4, 128),
        seqlen=torch.tensor([[2, 3], [3, 4]], dtype=torch.int32),
        mask_type="no_mask",
        calc_type="calc_type_default",
        pre_out=out,
        prev_lse=lse,
    )
    return {**given, **changes}


def test_ring_mla_adds_keys_to_a_result() -> None:
    """The last query of the second request, by hand."""
    own = ring()
    out, lse = KERNELS.ring_mla(**own)
    assert out.shape == (5, 4, 128)
    assert lse.shape == (4, 5)
    more = prefix(q_nope=own["q_nope"], q_rope=own["q_rope"], pre_out=out, prev_lse=lse)
    both, sums = KERNELS.ring_mla(**more)
    k, v = (
        torch.cat([own[name][2:, 1], more[name][3:, 1]]).float() for name in ("k_nope", "value")
    )
    k_rope = torch.cat([own["k_rope"][2:, 1], more["k_rope"][3:, 1]]).float()
    q, q_rope = own["q_nope"][4, 1].float(), own["q_rope"][4, 1].float()
    logits = (k @ q + k_rope @ q_rope) * 0.1
    torch.testing.assert_close(sums[1, 4], logits.logsumexp(0))
    torch.testing.assert_close(both[4, 1].float(), logits.softmax(0) @ v, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"input_layout": "type_bnsd"}, "input_layout"),
        ({"kernel_type": "kernel_type_default"}, "not emulated"),
        ({"mask_type": None}, "mask_type"),
        ({"mask": torch.ones(512, 512, dtype=torch.bfloat16)}, "upper triangle"),
        ({"q_nope": rows(5, 4, 256)[..., ::2]}, "non-contiguous"),
        ({"q_nope": rows(5, 4, 192)}, "q_nope is"),
        ({"k_rope": rows(5, 1, 64)}, "k_rope is"),
        ({"value": rows(5, 4, 64)}, "value is"),
        ({"seqlen": torch.tensor([2, 3])}, "int32"),
        ({"seqlen": torch.tensor([2, 2], dtype=torch.int32)}, "differ"),
        ({"seqlen": torch.tensor([5, 0], dtype=torch.int32)}, "should not be 0"),
        ({"seqlen": torch.tensor([[2, 2], [2, 3]], dtype=torch.int32)}, "differ"),
        ({"pre_out": rows(5, 4, 128), "prev_lse": torch.zeros(4, 5)}, "takes no result"),
    ],
)
def test_what_ring_mla_refuses(changes, match) -> None:
    with pytest.raises(RuntimeError, match=match):
        KERNELS.ring_mla(**ring(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seqlen": torch.tensor([[2, 3], [7, 0]], dtype=torch.int32)}, "without keys"),
        ({"seqlen": torch.tensor([[2, 3], [5, 2]], dtype=torch.int32)}, "fewer than its queries"),
        ({"mask_type": "mask_type_triu"}, "more keys than queries"),
        ({"pre_out": None}, "takes pre_out and prev_lse"),
        ({"prev_lse": torch.zeros(5, 4)}, "prev_lse"),
        ({"calc_type": None}, "not emulated: calc_type"),
    ],
)
def test_prefixes_that_ring_mla_refuses(changes, match) -> None:
    with pytest.raises(RuntimeError, match=match):
        KERNELS.ring_mla(**prefix(**changes))
