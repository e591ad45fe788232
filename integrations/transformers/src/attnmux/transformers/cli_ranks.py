"""The ranks of `attnmux generate --tp` and `--pcp`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click
from transformers import PreTrainedConfig

from attnmux.core import InvalidInput, NoBackend, RanksDiffer
from attnmux.core.cli.run import Run
from attnmux.transformers.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """The options of the command."""

    tp: int | None
    """Ranks; None: as many as a launcher started, else one."""
    dcp: bool
    """Whether KV is interleaved over the ranks."""
    pcp: int | None
    """Ranks that split long prompts, in place of `tp`."""
    pcp_min_tokens: int | None
    """New tokens of a prompt that is split; None: as `PrefillParallelRanks` says."""

    @property
    def size(self) -> int | None:
        """Ranks that are asked for."""
        return self.tp if self.pcp is None else self.pcp

    @property
    def option(self) -> str:
        """The one that asks for them."""
        return "--tp" if self.pcp is None else "--pcp"

    def check(self, *, watched: bool) -> None:
        """Raise InvalidInput for options that exclude each other.

        watched: whether the reference watches steps, or failures are kept.
        """
        if self.pcp is not None and (self.tp is not None or self.dcp):
            expected = "--pcp alone, where each device has the whole model and all K and V"
            raise InvalidInput(
                "--pcp", got=f"--{'dcp' if self.dcp else 'tp'} too", expected=expected
            )
        if self.pcp is not None and watched:
            expected = "1 rank for these: a rank sees a part of a split step"
            raise InvalidInput("--pcp", got="--canary or --keep-failures too", expected=expected)
        if self.pcp is None and self.pcp_min_tokens is not None:
            expected = "--pcp, whose prompts it splits"
            raise InvalidInput("--pcp-min-tokens", got=self.pcp_min_tokens, expected=expected)

    def start(self, run: Run) -> None:
        """Start the ranks, if they are asked for and this process is none of them, and exit with
        their status. Raises InvalidInput without attnmux-distributed."""
        if self.size is None or self.size == 1:
            return
        try:
            from attnmux.transformers.parallel import launch  # noqa: PLC0415  # an extra
        except ModuleNotFoundError as error:
            raise self._missing(error) from error
        if not launch.is_rank():
            # This process only waits: the ranks read the command line
            arguments = ("-m", "attnmux.core", *sys.argv[1:])
            raise click.exceptions.Exit(
                launch.run_ranks(arguments, self.size, run.answer or sys.stdout)
            )

    def ranks(self, device_type: str, config: PreTrainedConfig) -> Ranks:
        """This process's place among the ranks. Raises InvalidInput for `dcp` on one."""
        from torch.distributed import is_torchelastic_launched  # noqa: PLC0415  # slow

        if not is_torchelastic_launched():
            if self.dcp:
                raise InvalidInput("--dcp", got="1 rank", expected="--tp with 2 ranks or more")
            return ONE_RANK
        try:
            from attnmux.transformers.parallel import (  # noqa: PLC0415  # an extra
                launch,
                prefill,
                ranks,
            )
        except ModuleNotFoundError as error:
            raise self._missing(error) from error
        group = launch.join(device_type, self.size, self.option)
        if self.pcp is not None:
            return prefill.PrefillParallelRanks(group, least_tokens=self.pcp_min_tokens)
        if self.dcp:
            return ranks.InterleavedRanks(group, config)
        return ranks.TensorParallelRanks(group, config)

    def _missing(self, error: ModuleNotFoundError) -> InvalidInput:
        if not (error.name or "").startswith("attnmux"):
            raise error
        expected = "attnmux-distributed for several ranks: pip install attnmux-distributed"
        return InvalidInput(self.option, got=f"no module {error.name}", expected=expected)


@contextlib.contextmanager
def only_first(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 alone print. Errors that every rank raises are printed by rank 0; those of one
    rank, by that rank."""
    if ranks.rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        except (RanksDiffer, NoBackend, InvalidInput) as error:
            if isinstance(error, InvalidInput) and error.argument not in ("tp", "pcp"):
                raise
            raise click.exceptions.Exit(1) from error
