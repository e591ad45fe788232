"""Checks of linear layers after a step that verifies drafts, and after drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnmux.testing import reference
from attnmux.testing.run.comparison import Disagreement, Tolerance, compare
from attnmux.testing.run.linear_execution import LinearExecution
from attnmux.testing.setup.linear import LinearInput, LinearSetup, LinearStep

EXACT = Tolerance(atol=0, rtol=0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Left:
    """The states of one layer's recurrence, or of one convolution."""

    what: str
    own: torch.Tensor
    """The pool's buffer of the requests' own states."""
    drafted: torch.Tensor
    """The pool's buffer of those after draft tokens."""
    expected: torch.Tensor
    """[B, d + 1, …]: the states after each number of draft tokens."""
    found: torch.Tensor
    """[B, d + 1, …]: what the pool says they are; after no token, the request's own state."""
    num_written: int
    """Places of a row of `drafted` that the step writes."""
    tolerance: Tolerance


class DraftCheck:
    """The states of a setup before a step that verifies drafts, and what must be so afterwards."""

    def __init__(self, setup: LinearSetup, step: LinearStep) -> None:
        self._setup, self._step = setup, step
        self._before = {
            id(each): each.clone() for each in (*setup.states.buffers, *setup.states.draft_buffers)
        }

    def check(self, execution: LinearExecution, tolerance: Tolerance) -> None:
        """Check the states that the step left, accept a random number of each request's drafts, and
        check the requests' own states.

        tolerance: of recurrent states; the inputs of convolutions are exact. Raises Disagreement.
        """
        setup, step = self._setup, self._step
        left = [each for given in step.inputs for each in self._of_layer(given, tolerance)]
        rows, real = step.batch.req_pool_indices, step.num_real
        for each in left:
            self._same(
                each.what, each.own, rows[:0], "own state was written before it was accepted"
            )
            compare(f"{each.what}, states after drafts", *_values(each, real, 1), each.tolerance)
            drafts, before = each.drafted, self._before[id(each.drafted)]
            self._same(each.what, drafts, rows, "state of another request was written")
            if not _bits(drafts[1:, each.num_written :]).equal(
                _bits(before[1:, each.num_written :])
            ):
                raise Disagreement(f"{each.what}: a state beyond the step's drafts was written")
        most = step.batch.drafts().draft_token_num + 1
        counts = torch.randint(0, most, (len(rows),), generator=setup.generator)
        counts = counts.to(rows.device, torch.int32)
        execution.accept(step, counts)
        for each in left:
            self._same(each.what, each.own, rows, "state of another request was accepted")
            picked = each.expected[torch.arange(real, device=rows.device), counts[:real].long()]
            kept = counts[:real] > 0
            own = each.own[rows[:real]]
            compare(f"{each.what}, accepted", own[kept], picked[kept].double(), each.tolerance)
            before = self._before[id(each.own)][rows[:real]]
            if not _bits(own[~kept]).equal(_bits(before[~kept])):
                raise Disagreement(f"{each.what}: a state changed without an accepted draft")

    def _same(self, what: str, buffer: torch.Tensor, rows: torch.Tensor, said: str) -> None:
        """Raise Disagreement where rows of others than these, and padding's, have changed."""
        others = torch.ones(len(buffer), dtype=torch.bool, device=buffer.device)
        others[rows] = False
        others[0] = False
        if not _bits(buffer[others]).equal(_bits(self._before[id(buffer)][others])):
            raise Disagreement(f"{what}: the {said}")

    def _of_layer(self, given: LinearInput, tolerance: Tolerance) -> Iterator[_Left]:
        layer, step, pool = given.layer, self._step, self._setup.states
        rows, num = step.batch.req_pool_indices, step.batch.drafts().draft_token_num
        for index, (x, weight, bias) in enumerate(given.convs):
            own, line = pool.conv(layer.layer_id, index), pool.draft_conv(layer.layer_id, index)
            states = [self._start(own)]
            for place in range(num):
                _, after = reference.convolution(
                    x[place::num], weight, bias, silu=False, states=states[-1], new=[1] * len(rows)
                )
                states.append(after)
            taps = own.shape[1]
            found = [line[rows, place : place + taps] for place in range(num + 1)]
            yield _Left(
                what=f"layer {layer.layer_id}, convolution {index}",
                own=own,
                drafted=line,
                expected=torch.stack(states, dim=1),
                found=torch.stack(found, dim=1),
                num_written=taps + num,
                tolerance=EXACT,
            )
        if not layer.has_state:
            return
        own, drafted = pool.state(layer.layer_id), pool.draft_state(layer.layer_id)
        states = [self._start(own)]
        for place in range(num):
            q, k, v, g = (each[place::num] for each in (given.q, given.k, given.v, given.g))
            beta = None if given.beta is None else given.beta[place::num]
            ones = [1] * len(rows)
            _, after = reference.recurrence(layer, q, k, v, g, beta, states[-1], ones)
            states.append(after)
        yield _Left(
            what=f"layer {layer.layer_id}",
            own=own,
            drafted=drafted,
            expected=torch.stack([each.double() for each in states], dim=1),
            found=torch.cat([states[0].to(drafted).unsqueeze(1), drafted[rows, :num]], dim=1),
            num_written=num,
            tolerance=tolerance,
        )

    def _start(self, own: torch.Tensor) -> torch.Tensor:
        """[B, …]: each request's state before the step."""
        states = self._before[id(own)][self._step.batch.req_pool_indices].clone()
        states[self._step.fresh] = 0
        return states


def _values(left: _Left, real: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Found and expected, of requests that are no padding and from so many drafts on."""
    return left.found[:real, first:], left.expected[:real, first:].double()


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Equal where values are, NaN included."""
    # Of a single value, no other copy has a stride of 1.
    return values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
