"""What `choice.py` asks for: requests of a model, and steps of each."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.bench.workload import Workload
from attnmux.core.choosing.ask.request import Request
from attnmux.core.cli.select import requested
from attnmux.core.graph.config import graph_batch_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model's attention over pages of one size, and the steps that are timed of it."""

    name: str
    fields: str
    """As `attnmux bench --request` reads them."""
    steps: tuple[str, ...]
    """As `attnmux bench --workload` reads them."""

    @property
    def request(self) -> Request:
        return requested(None, self.fields, 1, None)

    @property
    def workloads(self) -> list[Workload]:
        return [Workload.parse(text) for text in self.steps]


def _dense(page: int, *steps: str, q: int = 32, kv: int = 8) -> Model:
    fields = f"num_q_heads={q},num_kv_heads={kv},head_dim=128,dtype=bf16,page_size={page}"
    return Model(name=f"{q}/{kv} heads, page {page}", fields=fields, steps=steps)


def _latent(heads: int, *steps: str) -> Model:
    shapes = "num_kv_heads=1,head_dim=192,v_head_dim=128,kv_lora_rank=512,qk_rope_head_dim=64"
    fields = f"kind=mla,num_q_heads={heads},{shapes},dtype=bf16,page_size=64"
    return Model(name=f"MLA of {heads} heads, page 64", fields=fields, steps=steps)


MODELS = (
    _dense(
        16,
        "decode:bs=1,ctx=4096",
        "decode:bs=1,ctx=65536",
        "decode:bs=16,ctx=4096",
        "decode:bs=128,ctx=2048",
        "decode:bs=64,ctx=16384",
        # Of uneven lengths where kernels are compared; the requests of a measurement are alike.
        "decode:bs=64,ctx=8192",
        "extend:bs=1,new=8192",
        "extend:bs=4,new=512,prefix=8192",
    ),
    _dense(1, "decode:bs=16,ctx=4096", "decode:bs=64,ctx=4096", "extend:bs=8,new=2048"),
    _dense(64, "decode:bs=64,ctx=4096", "extend:bs=1,new=32768"),
    _dense(16, "decode:bs=64,ctx=4096", q=64),
    _dense(16, "decode:bs=64,ctx=2048", q=32, kv=32),
    _latent(16, "decode:bs=1,ctx=8192", "decode:bs=64,ctx=4096", "decode:bs=128,ctx=8192"),
    _latent(128, "decode:bs=64,ctx=4096"),
)
"""11 decode steps of dense models, 4 of MLA, and 4 extend steps."""

MOST = 64
SIZES = _dense(
    16,
    *(
        f"decode:bs={size},ctx=4096"
        for size in graph_batch_sizes(pool_size=2 * MOST, max_batch_size=MOST)
    ),
)
"""One context at the batch sizes that a runner of graphs captures."""

_SMALL = "num_q_heads=4,num_kv_heads=2,head_dim=16,dtype=bf16"
TINY_MODELS = (
    Model(
        name="4/2 heads, page 16",
        fields=f"{_SMALL},page_size=16",
        steps=("decode:bs=1,ctx=9", "decode:bs=4,ctx=30", "extend:bs=1,new=3"),
    ),
)
TINY_SIZES = Model(
    name="4/2 heads, page 16",
    fields=f"{_SMALL},page_size=16",
    steps=("decode:bs=1,ctx=9", "decode:bs=4,ctx=9"),
)
