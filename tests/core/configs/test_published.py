"""Published models are read as their cards say, on one rank and on eight."""

from __future__ import annotations

import json
from runpy import run_path

import pytest

from attnmux.configs import request_from_model
from attnmux.core import InvalidInput, LayerGroup, Request

ROWS = run_path(__file__.replace("test_published", "published"))["ROWS"]


def test_there_are_a_hundred() -> None:
    assert len({name for name, _, _ in ROWS}) == len(ROWS) >= 100


@pytest.mark.parametrize(("name", "expected", "config"), ROWS, ids=[row[0] for row in ROWS])
def test_a_model_is_read_as_its_card_says(tmp_path, name, expected, config) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if expected.startswith("refused: "):
        with pytest.raises(InvalidInput) as caught:
            request_from_model(tmp_path)
        assert expected.removeprefix("refused: ") in str(caught.value)
        return
    request = request_from_model(tmp_path)
    assert in_short(request) == expected
    check_ranks(tmp_path, request, tp=8)


def check_ranks(folder, request: Request, *, tp: int) -> None:
    """Each rank has its share of the heads, and at least one KV head, which ranks may share."""
    heads, kv_heads = request.num_q_heads, request.num_kv_heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        with pytest.raises(InvalidInput, match=r"^tp: "):
            request_from_model(folder, tp=tp)
        return
    rank = request_from_model(folder, tp=tp)
    assert (rank.num_q_heads, rank.num_kv_heads) == (heads // tp, max(1, kv_heads // tp))
    assert (rank.head_dim, rank.linear_layers) == (request.head_dim, request.linear_layers)


def in_short(request: Request) -> str:
    parts = [
        request.kind,
        shape(request),
        request.kv_lora_rank and f"latent{request.kv_lora_rank}+{request.qk_rope_head_dim}",
        request.index_topk and f"top{request.index_topk}",
        request.dtype,
        "alibi" * request.alibi,
        "relative" * request.relative_bias,
        "cross" * request.cross_attention,
        f"image{request.encoder_head_dim or ''}" * request.multimodal,
        f"encoder{request.encoder_head_dim}" * (request.phases == ("encoder",)),
        *(f"{each.layers}*({shape(each)})" for each in request.other_layers),
        *(f"{kind}:{count}" for kind, count in request.linear_layers),
    ]
    return " ".join(filter(None, parts))


def shape(group: Request | LayerGroup) -> str:
    dims = f"x{group.head_dim}" + (f":{group.v_head_dim}" if group.v_head_dim else "")
    parts = [
        f"{group.num_q_heads}/{group.num_kv_heads}{dims}",
        group.sliding_window and f"w{group.sliding_window}",
        group.attention_chunk and f"chunk{group.attention_chunk}",
        "sinks" * group.sinks,
        group.logit_cap and f"cap{group.logit_cap}",
    ]
    return " ".join(filter(None, parts))
