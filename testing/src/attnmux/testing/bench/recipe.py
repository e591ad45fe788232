"""The shapes and the steps that `attnmux bench --ship` times on every device of a type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnmux.core import Platform, Request
from attnmux.testing.bench.grid import MEMORY_SHARE
from attnmux.testing.bench.roofline import cost_of
from attnmux.testing.bench.spot import Steps
from attnmux.testing.bench.workload import Workload

DRAFTS = 4
"""Drafts of a request whose verification is timed, the token before them included."""

DECODE = (
    *((1, 4096), (32, 4096), (8, 2048), (128, 1024), (1, 65536), (8, 32768)),
    *((128, 4096), (32, 16384)),
)
EXTEND = ((1, 4096, 0), (4, 512, 8192), (1, 1024, 0), (8, 1024, 1024))
VERIFY = ((1, 4096), (16, 4096), (64, 2048))
LEAST_FLOPS = 3e10
"""Of a prompt that an accelerator is timed with: about 0.1 ms. Below it the host takes longer, and
which backend has the faster host differs by machine. Windows are not counted: tiles at their edges
take more time than their share of the products."""
DECODE_CPU = ((1, 1024), (4, 512), (16, 256))
EXTEND_CPU = ((1, 128, 0), (2, 32, 256))
VERIFY_CPU = ((1, 256), (4, 256))
"""(batch size, context) of decode, (batch size, new, prefix) of extend, and (batch size, prefix) of
verification; what tells most comes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Steps of one phase of a shape."""

    request: Request
    """The shape, as a file of figures has it."""
    phase: str
    workloads: tuple[Workload, ...]

    @property
    def steps(self) -> Steps:
        """The steps, and the request that the phase's backends get."""
        asked = self.request.replace(phases=(self.phase,))
        if self.phase == "verify":
            asked = asked.replace(spec_topk=1, spec_draft_tokens=DRAFTS)
        return Steps(asked, self.workloads)


def _dense(q: int, kv: int, dim: int, **more: object) -> Request:
    fields = {"num_q_heads": q, "num_kv_heads": kv, "head_dim": dim, "dtype": "bfloat16"}
    return Request.from_dict({"kv_dtype": "bfloat16", **fields, **more})


def _latent(heads: int, **more: object) -> Request:
    latents = {"kind": "mla", "v_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return _dense(heads, 1, 192, **latents, **more)


FP8 = {"kv_dtype": "fp8_e4m3"}
SHAPES = (
    # A model of 8 billion parameters, DeepSeek-V3 on 8 ranks, MHA, and gpt-oss with its sinks
    *(_dense(32, 8, 128), _latent(16), _dense(32, 8, 128, **FP8), _dense(32, 32, 128)),
    *(_dense(64, 8, 64, sinks=True, sliding_window=127), _dense(64, 8, 64, sinks=True)),
    *(_dense(64, 4, 128), _latent(128), _dense(8, 1, 128), _dense(16, 8, 256)),
    *(_dense(32, 8, 64), _dense(32, 8, 96), _dense(64, 4, 192, v_head_dim=128), _latent(64)),
    *(_dense(32, 8, 128, sliding_window=1023), _dense(32, 8, 128, page_size=1)),
    *(_dense(64, 4, 128, **FP8), _latent(16, **FP8), _latent(128, **FP8), _latent(32)),
    *(_dense(32, 8, 64, **FP8), _dense(16, 8, 256, **FP8), _dense(32, 32, 128, **FP8)),
    *(_dense(64, 4, 192, v_head_dim=128, **FP8), _dense(16, 8, 256, logit_cap=50.0)),
    *(_dense(32, 32, 64), _dense(32, 32, 96), _dense(32, 32, 80), _dense(16, 16, 256)),
    *(_dense(32, 32, 192, v_head_dim=128), _dense(16, 1, 64), _dense(16, 1, 256)),
    *(_dense(16, 4, 80), _dense(16, 4, 112), _dense(4, 4, 128), _dense(16, 2, 128)),
    *(_dense(32, 8, 128, logit_cap=50.0), _dense(32, 8, 128, sinks=True)),
    *(_dense(16, 8, 256, sliding_window=1023), _latent(16, page_size=1), _latent(8)),
    *(_dense(32, 8, 128, page_size=1, **FP8), _dense(8, 1, 128, **FP8), _dense(32, 8, 96, **FP8)),
    *(_dense(16, 4, 80, **FP8), _dense(16, 4, 112, **FP8), _dense(32, 8, 128, page_size=16)),
    # The rest of every width by MHA, GQA and MQA, with 16 bits and with 8
    *(_latent(64, **FP8), _latent(32, **FP8)),
    *(_dense(64, 8, 64, sinks=True, sliding_window=127, **FP8), _dense(16, 1, 96)),
    *(_dense(64, 8, 64, sinks=True, **FP8), _dense(32, 8, 128, sliding_window=1023, **FP8)),
    *(_dense(16, 8, 256, sliding_window=1023, **FP8), _dense(16, 1, 192, v_head_dim=128)),
    *(_dense(32, 32, 64, **FP8), _dense(32, 32, 96, **FP8), _dense(16, 16, 256, **FP8)),
    *(_dense(16, 1, 64, **FP8), _dense(16, 1, 256, **FP8)),
    *(_dense(32, 32, 192, v_head_dim=128, **FP8), _dense(16, 1, 96, **FP8)),
    *(_dense(16, 1, 192, v_head_dim=128, **FP8), _latent(8, **FP8)),
    _dense(32, 32, 128, sliding_window=1023),
)
SHAPES_CPU = (
    *(_dense(8, 2, 64), _dense(8, 2, 128), _dense(8, 8, 64), _dense(8, 8, 128)),
    *(_dense(8, 2, 128, **FP8), _dense(8, 2, 64, sliding_window=127), _latent(8)),
)
"""The shapes of most models come first, so that a run that ends early is of use."""


def tasks(platform: Platform) -> Iterator[Task]:
    """Every phase of every shape whose steps fit the device's memory."""
    on_cpu = platform.device_type == "cpu"
    room = platform.memory_bytes * MEMORY_SHARE or float("inf")
    steps = _steps(on_cpu)
    for request in SHAPES_CPU if on_cpu else SHAPES:
        width = 1 if request.kv_dtype == FP8["kv_dtype"] else 2
        for phase, workloads in steps.items():
            fitting = [
                each
                for each in workloads
                if 2 * each.stored_bytes(request, width) <= room
                and (on_cpu or not _waits(each, request))
            ]
            if fitting:
                yield Task(request=request, phase=phase, workloads=tuple(fitting))


def _waits(workload: Workload, request: Request) -> bool:
    """Whether a prompt is so short that an accelerator waits for the host."""
    unlimited = request.replace(sliding_window=None)
    return workload.phase == "extend" and cost_of(workload, unlimited).flops < LEAST_FLOPS


def _steps(on_cpu: bool) -> dict[str, list[Workload]]:
    decode, extend, verify = (
        (DECODE_CPU, EXTEND_CPU, VERIFY_CPU) if on_cpu else (DECODE, EXTEND, VERIFY)
    )
    return {
        "decode": [Workload(phase="decode", batch_size=b, prefix=ctx - 1) for b, ctx in decode],
        "extend": [
            Workload(phase="extend", batch_size=b, new=new, prefix=prefix)
            for b, new, prefix in extend
        ],
        "verify": [
            Workload(phase="verify", batch_size=b, new=DRAFTS, prefix=prefix)
            for b, prefix in verify
        ],
    }
