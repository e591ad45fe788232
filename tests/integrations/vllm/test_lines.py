"""vLLM reads every word of the lines that `select --engine vllm` prints."""

from __future__ import annotations

import pytest

from attnmux.core import Chooser, LayerGroup, Request
from attnmux.vllm import launch

arguments = pytest.importorskip("vllm.engine.arg_utils")
parsers = pytest.importorskip("vllm.utils.argparse_utils")

# vLLM and its dependencies warn of themselves
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_parser_knows_every_word():
    heads = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    kept = LayerGroup(layers=2, **heads, kv_dtype="bfloat16")
    request = Request().replace(
        **heads,
        dtype="bfloat16",
        kv_dtype="fp8_e4m3",
        other_layers=(kept,),
        page_size=64,
        deterministic=True,
        spec_topk=1,
        spec_draft_tokens=4,
    )
    chooser = Chooser.here("cpu")
    decision = chooser.decide(launch.ask(request, chooser.platform))
    words = launch.launch(decision, "MODEL", tp=2, kv_dtype_skip="0-1")
    assert words[0] == "VLLM_BATCH_INVARIANT=1"
    parser = parsers.FlexibleArgumentParser()
    arguments.AsyncEngineArgs.add_cli_args(parser)
    read = parser.parse_args(words[words.index("--model") :])
    assert (read.model, read.attention_backend, read.dtype) == ("MODEL", "ATTNMUX", "bfloat16")
    assert (read.block_size, read.tensor_parallel_size) == (64, 2)
    assert (read.kv_cache_dtype, read.kv_cache_dtype_skip_layers) == ("fp8_e4m3", ["0", "1"])
    assert read.speculative_config["num_speculative_tokens"] == 3
