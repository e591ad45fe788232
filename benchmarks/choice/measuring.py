"""The models of the benchmark, and how their steps are measured, decided and measured again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from attnmux.core import AttnmuxError, GraphConfig, Measurement, Request, Settings, solve_measured
from attnmux.core.verbs import Run, requested
from attnmux.testing.bench import Bench, Row, Workload, completed
from attnmux.testing.bench.cli.bench_run import Keeper, Kept, find_place, measure
from attnmux.testing.bench.margins import server_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model's attention over pages of one size, and its steps that are timed."""

    name: str
    fields: str
    """As `attnmux bench --request` reads them."""
    steps: tuple[str, ...]
    """As `attnmux bench --workload` reads them."""

    @property
    def request(self) -> Request:
        return requested(None, [self.fields], 1, None)

    @property
    def workloads(self) -> list[Workload]:
        return [Workload.parse(text) for text in self.steps]


def _dense(page: int, *steps: str, q: int = 32, kv: int = 8, dim: int = 128) -> Model:
    fields = f"num_q_heads={q},num_kv_heads={kv},head_dim={dim},dtype=bf16,page_size={page}"
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
        # `triton_gpu.py` has uneven lengths here; measurements are of even ones
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
        for size in GraphConfig.sizes(pool_size=2 * MOST, max_batch_size=MOST)
    ),
)
"""One context at the batch sizes that a graph runner captures."""

TINY_MODELS = (
    _dense(
        *(16, "decode:bs=1,ctx=9", "decode:bs=4,ctx=30", "extend:bs=1,new=3"), q=4, kv=2, dim=16
    ),
)
TINY_SIZES = _dense(16, "decode:bs=1,ctx=9", "decode:bs=4,ctx=9", q=4, kv=2, dim=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A step, the backend that was chosen for it, and the time of each backend."""

    model: str
    workload: Workload
    chosen: str
    """`plugin/name`."""
    times: Mapping[str, float]
    """Microseconds of one layer's call by address, measured after the choice: of the backends that
    answered rightly and passed their check."""

    @property
    def best(self) -> str | None:
        return min(self.times, key=lambda address: self.times[address], default=None)

    def over_best(self, address: str) -> float | None:
        """A backend's time over the best one's; None where it has no time."""
        if self.best is None or address not in self.times:
            return None
        return self.times[address] / self.times[self.best]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """Measures models' steps on this machine."""

    names: Sequence[str] = ()
    """The only backends; all where it is empty."""
    without: tuple[str, ...] = ()
    """Backends that are neither timed nor chosen."""
    platform: str | None = None
    """A vendor, if the machine has devices of several."""
    seconds: float = 0.3
    """Least time for one figure."""
    check_seconds: float = 3.0
    """Most time to check one backend in one phase."""

    def serve(self, model: Model) -> tuple[list[Served], list[str]]:
        """Each step with its chosen backend and all times, and notes about backends without a time.

        Measurements have a file of their own: the machine's are neither used nor changed.
        """
        with TemporaryDirectory() as folder:
            run, file = Run(), Path(folder) / "measurements.json"
            settings = replace(
                Settings.load(),
                measurements=str(file),
                no_measurements=False,
                deny_backends=self.without,
            )
            place, policy = find_place(run, settings, self.platform, ""), settings.policy()
            asked = model.request
            keeper = Keeper.open(run, settings, asked, place)
            result = measure(
                place,
                completed(asked),
                policy,
                workloads=model.workloads,
                names=self.names,
                seconds=self.seconds,
            )
            kept = keeper.keep(result, self.check_seconds)
            known = Measurement.read(file).found
            decisions = {
                phase: solve_measured(
                    asked.replace(phases=(phase,)),
                    place.platform,
                    place.offers,
                    policy,
                    measurements=known,
                )
                for phase in {each.phase for each in model.workloads}
            }
        # The same steps once more: a choice looks better by the figures that made it
        field = result.field
        bench = Bench(
            device=torch.device(place.device),
            ceilings=result.ceilings,
            graphs=field.graphs,
            seconds=self.seconds,
        )
        again = tuple(bench.rows(field.workloads, field.entrants))
        times = _times(again, kept)
        served = [
            Served(
                model=model.name,
                workload=each,
                chosen=server_of(decisions[each.phase], each),
                times=times.get(str(each), {}),
            )
            for each in model.workloads
        ]
        return served, list(_notes((*result.rows, *again), kept))


def _times(rows: Iterable[Row], kept: Kept) -> Mapping[str, Mapping[str, float]]:
    """By workload and address."""
    sound = {(each.backend, each.phase) for each in kept.measurements if each.conformant}
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.median_us is not None and (row.backend, row.workload.phase) in sound:
            times.setdefault(str(row.workload), {})[row.backend] = row.median_us
    return times


def _notes(rows: Iterable[Row], kept: Kept) -> Iterable[str]:
    for row in rows:
        if row.status != "measured":
            yield f"{row.backend}, {row.workload}: {row.status}: {row.why}"
    for each in kept.checks:
        if not each.conformant:
            yield f"{each.backend}, {each.phase}: not conformant: {each.failure}"


def failed(model: Model, error: Exception) -> tuple[list[Served], list[str]]:
    """The steps of a model that could not be measured: no backend has a time."""
    served = [
        Served(model=model.name, workload=each, chosen="-", times={}) for each in model.workloads
    ]
    return served, [f"{model.name}: {AttnmuxError.in_brief(error)}"]
