"""Times what interleaving KV over ranks adds to a decode step, on the ranks that torchrun started.

    torchrun --nproc-per-node 2 -m benchmarks.interleaved

Prints the microseconds of one layer's exchange and merge, in a graph, and of gathering the queries.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from attnmux.distributed import HeadSplit, RankGroup, exchange_and_merge
from attnmux.triton.functions.rank_merge import RankMerger

CALLS = 20
"""In one graph, so that a launch costs nothing."""

SHAPES = {"32 heads x 128": (32, 128, 128), "latent, 128 heads x 512": (128, 576, 512)}


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """The median of one call among `CALLS` in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    found: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    group = RankGroup.start("cuda")
    heads = HeadSplit(group=group)
    kernels = RankMerger()
    where = torch.cuda.get_device_name()
    if group.rank == 0:
        print(f"{group.size} x {where}, torch {torch.__version__}, us of a layer, bfloat16")
    for name, (num_heads, q_dim, dim) in SHAPES.items():
        for batch in (1, 16, 64, 256):
            out = torch.randn(batch, num_heads, dim, device=group.device, dtype=torch.bfloat16)
            lse = torch.randn(batch, num_heads, device=group.device)
            q = torch.randn(
                batch, num_heads // group.size, q_dim, device=group.device, dtype=torch.bfloat16
            )
            plain, fused = (
                microseconds(lambda: exchange_and_merge(group, out, lse, merger), rounds)  # noqa: B023  # called here
                for merger in (None, kernels)
            )
            gathered = microseconds(lambda: heads.gather_queries(q), rounds)  # noqa: B023  # likewise
            packed = out.new_empty((group.size, batch, num_heads // group.size, dim + 2))
            moved = microseconds(lambda: group.all_to_all(packed), rounds)  # noqa: B023  # likewise
            if group.rank == 0:
                print(
                    f"{name}, batch {batch}: exchange and merge {fused:.1f}, in plain torch "
                    f"{plain:.1f} (the all-to-all alone {moved:.1f}), gathering Q {gathered:.1f}",
                    flush=True,
                )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
