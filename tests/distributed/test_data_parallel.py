"""Data parallel attention: a toy model on several ranks agrees with one process that has all
batches.

The functions that `run_ranks` calls take their group and its device, so that they also run in
processes that torchrun started, over NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnmux.core import (
    AttentionBackend,
    CapturingRanks,
    DeviceGraphs,
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    InvalidInput,
    ModelInput,
)
from attnmux.cpu.torch_native.backend import TorchNativeBackend
from attnmux.distributed import (
    PaddingMode,
    RankGroup,
    RanksDiffer,
    TokensOfRanks,
    agree_on_step,
    capture_on_all_ranks,
    idle_batch,
)
from attnmux.emulators.ranks import end_ranks, run_ranks
from attnmux.testing import (
    Case,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    fake_platform,
    make_setup,
)

CASE = Case(
    name="toy",
    steps=(decode(*[32] * 6),),
    dtype="float32",
    page_size=4,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=16,
    max_context_len=32,
)
WIDTH, INNER, WORDS = 24, 48, 50
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
"""Of hidden states around 1, where a sum over ranks or a product has another order."""

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
Requests = dict[int, int]
"""New tokens of each request."""

STEPS: list[tuple[list[tuple[ForwardMode, Requests]], bool]] = [
    ([(EXTEND, {0: 5, 1: 3}), (EXTEND, {3: 1}), (EXTEND, {5: 4})], False),
    ([(EXTEND, {2: 12}), (EXTEND, {}), (EXTEND, {})], False),
    ([(DECODE, {0: 1, 1: 1, 2: 1}), (DECODE, {3: 1}), (DECODE, {})], True),
    ([(DECODE, {0: 1, 1: 1}), (EXTEND, {4: 6}), (DECODE, {5: 1})], False),
    ([(DECODE, {}), (DECODE, {3: 1, 4: 1}), (DECODE, {5: 1})], True),
    ([(DECODE, {}), (DECODE, {}), (EXTEND, {5: 3})], False),
    ([(DECODE, {2: 1, 0: 1, 1: 1}), (DECODE, {4: 1, 3: 1}), (DECODE, {5: 1})], True),
    ([(DECODE, {}), (DECODE, {}), (DECODE, {})], False),
]
"""The batch of each rank, and whether a graph serves them. Two ranks do without the third."""


class Toy:
    """A model of two layers with KV pools of its own: attention, then an MLP whose weights are
    split over ranks."""

    def __init__(
        self, make: Callable[..., AttentionBackend], device: torch.device, shards: int
    ) -> None:
        setup = make_setup(CASE, fake_platform(), device)
        self.backend, self.context = make(setup.context), setup.context
        self.shards, self.device = shards, device
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator) / shape[-2] ** 0.5
            return values.to(device)

        heads = CASE.num_q_heads + 2 * CASE.num_kv_heads
        self.embedding = weight(WORDS, WIDTH) * WORDS**0.5
        self.qkv, self.out = weight(2, WIDTH, heads * 16), weight(2, CASE.num_q_heads * 16, WIDTH)
        self.up = weight(2, WIDTH, INNER).unflatten(2, (shards, -1))
        self.down = weight(2, INNER, WIDTH).unflatten(1, (shards, -1))
        table = self.context.req_to_token_pool.req_to_token
        for request in range(6):
            table[request + 1] = 4 + 32 * request + torch.arange(32, device=device)
        self.lens = [0] * 6

    def step(self, mode: ForwardMode, requests: Requests) -> tuple[ForwardBatch, torch.Tensor]:
        """The batch and its token ids. Its new tokens are cached then."""
        if not requests:
            return idle_batch(self.device), torch.zeros(0, dtype=torch.int64, device=self.device)
        names, new = list(requests), list(requests.values())
        cached = [self.lens[name] for name in names]
        places = [
            (name, self.lens[name] + n) for name, count in requests.items() for n in range(count)
        ]
        for name, count in requests.items():
            self.lens[name] += count

        def lens(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        def numbers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self.device)

        is_extend = mode is EXTEND
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(names),
            req_pool_indices=numbers([name + 1 for name in names]),
            seq_lens=lens([self.lens[name] for name in names]),
            out_cache_loc=numbers([4 + 32 * name + place for name, place in places]),
            positions=numbers([place for _, place in places]),
            extend_seq_lens=lens(new) if is_extend else None,
            extend_prefix_lens=lens(cached) if is_extend else None,
            extend_num_tokens=len(places) if is_extend else None,
        )
        return batch, numbers([(7 * name + 3 * place) % WORDS for name, place in places])

    def layers(
        self,
        batch: ForwardBatch,
        ids: torch.Tensor,
        mlp: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """[T, WIDTH]: the hidden states; mlp: of hidden states, with a layer's weights."""
        hidden = self.embedding[ids]
        for index, layer in enumerate(self.context.layers):
            q, k, v = product(hidden, self.qkv[index]).unflatten(1, (-1, 16)).split((4, 2, 2), 1)
            attended = self.backend.forward(q, k, v, layer, batch)
            hidden = hidden + product(attended.flatten(1), self.out[index])
            hidden = hidden + mlp(hidden, self.up[index], self.down[index])
        return hidden

    def on_rank(
        self, batch: ForwardBatch, ids: torch.Tensor, tokens: TokensOfRanks
    ) -> torch.Tensor:
        """The hidden states of this rank's tokens."""
        rank = tokens.group.rank

        def mlp(hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            everyones = tokens.gather(hidden)
            inner = product(everyones, up[:, rank]).relu()
            return tokens.reduce_scatter(product(inner, down[rank]))

        return self.layers(batch, ids, mlp)

    def alone(self, batch: ForwardBatch, ids: torch.Tensor) -> torch.Tensor:
        """The hidden states of all ranks' tokens."""

        def mlp(hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            parts = [
                product(product(hidden, up[:, shard]).relu(), down[shard])
                for shard in range(self.shards)
            ]
            return sum(parts[1:], parts[0])

        self.backend.init_forward_metadata(batch)
        return self.layers(batch, ids, mlp)


def product(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A matrix product that adds in the same order for any number of rows."""
    return (values.unsqueeze(2) * weight).sum(1)


def expected_of(
    make: Callable[..., AttentionBackend], device: torch.device, size: int
) -> list[list[torch.Tensor]]:
    """The hidden states of each rank in each step, from one process with all batches."""
    toy, found = Toy(make, device, size), []
    for batches, _ in STEPS:
        modes, requests = zip(*batches[:size], strict=True)
        everyones = {name: new for each in requests for name, new in each.items()}
        mode = EXTEND if EXTEND in modes else DECODE
        hidden = toy.alone(*toy.step(mode, everyones))
        found.append(list(hidden.split([sum(each.values()) for each in requests])))
    return found


def served(
    group: RankGroup,
    make: Callable[..., AttentionBackend],
    mode: PaddingMode | None,
    *,
    in_graphs: bool,
) -> list[tuple[torch.Tensor, bool, str]]:
    """This rank's hidden states in each step, whether a graph made them, and the padding."""

    def padded(tokens: TokensOfRanks) -> TokensOfRanks:
        return tokens if mode is None else replace(tokens, mode=mode)

    def forward(batch: ForwardBatch, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = TokensOfRanks.even(group, batch.num_tokens)
        return toy.on_rank(batch, inputs["input_ids"], padded(tokens))

    toy = Toy(make, group.device, group.size)
    runners = []
    if in_graphs:
        runners.append(capture_on_all_ranks(group, runner_of(toy.backend, forward)))
    found = []
    for batches, _ in STEPS:
        batch, ids = toy.step(*batches[group.rank])
        agreed = agree_on_step(group, batch, runners)
        tokens = padded(agreed.tokens)
        if agreed.runner is None:
            toy.backend.init_forward_metadata(batch)
            hidden = toy.on_rank(batch, ids, tokens)
        else:
            inputs = {"input_ids": ids}
            hidden = agreed.runner.replay(batch, inputs, size=agreed.size).clone()
        found.append((hidden, agreed.runner is not None, tokens.mode.name))
    return found


def runner_of(backend: AttentionBackend, forward, sizes: Sequence[int] = (1, 2, 4), **settings):
    """How a rank makes its runner."""
    device = backend.context.device
    devices = RecordingGraphs() if device.type == "cpu" else DeviceGraphs.of(device)
    return lambda ranks: GraphRunner(
        backend,
        forward,
        GraphConfig(batch_sizes=tuple(sizes), **settings),
        devices=devices,
        inputs={"input_ids": ModelInput(dtype=torch.int64)},
        progress=iter,
        ranks=ranks,
    )


BACKENDS = {
    "eager": (TorchNativeBackend, TorchNativeBackend),
    "eager, exactly": (FakeBackend, FakeBackend),
    "graphs, exactly": (GraphFakeBackend, FakeBackend),
}
"""The backends of the ranks and of the process with all batches. The reference attends to each
request by itself, in float64, so that it gives the same bits in any batch."""


def agrees_with_one_process(group: RankGroup, way: str) -> dict[str, list[str]]:
    make, make_expected = BACKENDS[way]
    expected = expected_of(make_expected, group.device, group.size)
    in_graphs = way.startswith("graphs")
    # The sum of two ranks' parts has the same bits in either order
    exactly = way.endswith("exactly") and group.size == 2 and group.device.type == "cpu"
    tolerance = {"rtol": 0, "atol": 0} if exactly else FLOAT32
    modes = {}
    for mode in (None, *PaddingMode):
        found = served(group, make, mode, in_graphs=in_graphs)
        for number, (hidden, in_graph, _) in enumerate(found):
            assert in_graph is (in_graphs and STEPS[number][1]), number
            torch.testing.assert_close(hidden, expected[number][group.rank], **tolerance)
        modes[str(mode)] = [name for *_, name in found]
    return modes


@pytest.mark.parametrize("way", BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.turns(3)
def test_ranks_agree_with_one_process(tmp_path: Path, size: int, way: str) -> None:
    for modes in run_ranks(agrees_with_one_process, size, tmp_path, way):
        long, short = "MAX_LEN", "SUM_LEN"
        assert modes["PaddingMode.MAX_LEN"] == [long] * len(STEPS)
        assert modes["PaddingMode.SUM_LEN"] == [short] * len(STEPS)
        if size == 2:  # 2 max(T) is at most 2 sum(T)
            assert modes["None"] == [long] * len(STEPS)
        else:
            assert modes["None"] == [long, short, short, long, long, short, long, long]


def test_the_mode_that_moves_fewer_rows() -> None:
    assert PaddingMode.cheapest((8, 1)) is PaddingMode.MAX_LEN
    assert PaddingMode.cheapest((8, 4, 0)) is PaddingMode.MAX_LEN  # 3 * 8 rows against 2 * 12
    assert PaddingMode.cheapest((8, 3, 0)) is PaddingMode.SUM_LEN  # against 2 * 11
    assert PaddingMode.cheapest((9, 0, 0, 0)) is PaddingMode.SUM_LEN
    assert PaddingMode.cheapest((0, 0, 0)) is PaddingMode.MAX_LEN


def moves_tokens(group: RankGroup) -> None:
    counts = (3, 0, 5)[: group.size]
    generator = torch.Generator().manual_seed(3)
    everyones = [torch.randn((count, 2, 4), generator=generator) for count in counts]
    mine = everyones[group.rank].to(group.device)
    for mode in PaddingMode:
        tokens = TokensOfRanks(group=group, num_tokens=counts, mode=mode)
        most = max(counts) if mode is PaddingMode.MAX_LEN else 0
        expected = torch.cat(
            [
                torch.nn.functional.pad(each, (0, 0, 0, 0, 0, max(most - len(each), 0)))
                for each in everyones
            ]
        ).to(group.device)
        gathered = tokens.gather(mine)
        assert torch.equal(gathered, expected)
        assert tokens.num_rows == len(expected)
        assert torch.equal(tokens.scatter(gathered), mine)
        sum_of_parts = tokens.reduce_scatter(gathered * (group.rank + 1))
        torch.testing.assert_close(sum_of_parts, mine * sum(range(1, group.size + 1)))
        for call, argument, shape in (
            (tokens.gather, "hidden", (9, 2)),
            (tokens.reduce_scatter, "parts", (9, 2)),
            (tokens.scatter, "values", ()),
        ):
            with pytest.raises(InvalidInput, match=rf"{argument}: expected .* got shape") as info:
                call(torch.zeros(shape, device=group.device))
            assert f"for {counts} tokens in {mode.name}" in str(info.value)
    nothing = TokensOfRanks.even(group, 0)
    empty = torch.zeros((0, 4), device=group.device)
    assert nothing.reduce_scatter(nothing.gather(empty)).shape == (0, 4)


@pytest.mark.parametrize("size", [2, 3])
def test_moving_tokens(tmp_path: Path, size: int) -> None:
    run_ranks(moves_tokens, size, tmp_path)


def echo(batch: ForwardBatch, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return inputs["input_ids"] + 1


def agrees_on_graphs(group: RankGroup) -> None:
    first = group.rank == 0
    toy = Toy(GraphFakeBackend, group.device, group.size)
    decoding = capture_on_all_ranks(group, runner_of(toy.backend, echo, (1, 2)))
    drafts = {"forward_mode": ForwardMode.TARGET_VERIFY, "tokens_per_request": 3}
    verifying = capture_on_all_ranks(group, runner_of(toy.backend, echo, (1, 2), **drafts))
    both = (verifying, decoding)
    one, _ = toy.step(DECODE, {0: 1})
    two, _ = toy.step(DECODE, {0: 1, 1: 1})
    three, _ = toy.step(DECODE, {0: 1, 1: 1, 2: 1})
    idle, _ = toy.step(DECODE, {})
    prompt, _ = toy.step(EXTEND, {3: 4})
    for mine, theirs, runners, runner, size in (
        (one, one, both, decoding, 1),
        (one, two, both, decoding, 2),
        (two, idle, both, decoding, 2),
        (idle, one, both, decoding, 1),
        (idle, idle, both, None, None),
        (one, three, both, None, None),  # no graph is large enough
        (one, prompt, both, None, None),
        (one, one, (), None, None),
    ):
        agreed = agree_on_step(group, mine if first else theirs, runners)
        assert (agreed.runner, agreed.size) == (runner, size)
        assert agreed.tokens.num_tokens[:2] == (mine.num_tokens, theirs.num_tokens)
    ids = torch.tensor([5, 6, 7], device=group.device)
    spec = replace(
        two,
        batch_size=1,
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=two.req_pool_indices[:1],
        seq_lens=two.seq_lens[:1],
        out_cache_loc=ids,
        positions=ids,
        extend_num_tokens=3,
    )
    agreed = agree_on_step(group, spec if first else idle, both)
    assert agreed.runner is verifying
    assert agreed.tokens.num_tokens[:2] == (3, 0)
    batch, inputs = (spec, {"input_ids": ids}) if first else (idle, {})
    found = verifying.replay(batch, inputs, size=agreed.size).tolist()
    assert found == ([6, 7, 8] if first else [])


def test_ranks_agree_on_a_graph(tmp_path: Path) -> None:
    run_ranks(agrees_on_graphs, 2, tmp_path)


def differs(group: RankGroup) -> None:
    """Each error comes on both ranks, and the ranks can go on."""
    toy = Toy(GraphFakeBackend, group.device, group.size)
    batch, _ = toy.step(DECODE, {0: 1})
    sizes = (1, 2) if group.rank else (1, 2, 4)
    # As though the ranks had not captured together
    runner = capture_alone(runner_of(toy.backend, echo, sizes))
    message = (
        r"^the step: expected the same on every rank, got rank 0: DECODE of 1 tokens in sizes "
        r"\(1, 2, 4\); rank 1: DECODE of 1 tokens in sizes \(1, 2\); pass runners of"
    )
    with pytest.raises(RanksDiffer, match=message):
        agree_on_step(group, batch, [runner])
    with pytest.raises(RanksDiffer, match="rank 0: no graphs; rank 1: DECODE of 1 tokens"):
        agree_on_step(group, batch, [runner][: group.rank])
    assert agree_on_step(group, batch).tokens.num_tokens == (1, 1)


def capture_alone(make) -> GraphRunner:
    runner = make(CapturingRanks())
    runner.capture()
    return runner


def test_ranks_that_differ_are_an_error_on_each(tmp_path: Path) -> None:
    run_ranks(differs, 2, tmp_path)


def does_not_agree(group: RankGroup) -> None:
    group.exchange_numbers([0])  # both have their groups before one of them ends
    if group.rank == 0:
        agree_on_step(group, idle_batch(group.device))


def test_a_rank_that_takes_no_part_is_an_error_on_the_others(tmp_path: Path) -> None:
    first, second = end_ranks(does_not_agree, 2, tmp_path, seconds=2.0)
    assert "RankFailed: exchanging numbers: another rank ended or did not arrive" in first.error
    assert not second.error


def goes_on_eagerly(group: RankGroup) -> None:
    """A rank cannot capture; all run eagerly, and give what one process gives."""
    toy = Toy(GraphFakeBackend, group.device, group.size)

    def forward(batch: ForwardBatch, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = TokensOfRanks.even(group, batch.num_tokens)
        hidden = toy.on_rank(batch, inputs["input_ids"], tokens)
        if group.rank == 1:
            hidden.sum().item()
        return hidden

    with pytest.raises(
        GraphUnsupported, match=r"\(rank 1: GraphViolation: forward: .*item"
    ) as info:
        capture_on_all_ranks(group, runner_of(toy.backend, forward))
    assert "run eagerly on every rank" in str(info.value)
    expected = expected_of(FakeBackend, group.device, group.size)
    for number, (batches, _) in enumerate(STEPS):
        batch, ids = toy.step(*batches[group.rank])
        agreed = agree_on_step(group, batch)
        toy.backend.init_forward_metadata(batch)
        hidden = toy.on_rank(batch, ids, agreed.tokens)
        torch.testing.assert_close(hidden, expected[number][group.rank], **FLOAT32)


def test_a_rank_that_cannot_capture_makes_all_run_eagerly(tmp_path: Path) -> None:
    run_ranks(goes_on_eagerly, 2, tmp_path)
