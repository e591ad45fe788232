"""The ranks of `attnmux generate --tp` and `--pcp`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click
from transformers import PreTrainedConfig

from attnmux.core import InvalidInput, NoBackend, RankError
from attnmux.core.verbs import Run
from attnmux.transformers.cli.drafts import Drafting
from attnmux.transformers.ranks import ONE_RANK, Ranks

OF_THE_MODEL = ("tp", "pcp", "dp_attention")
"""Arguments of errors that every rank raises, since the model cannot be split."""


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
    dp_attention: bool
    """Whether each rank has requests of its own."""

    @property
    def size(self) -> int | None:
        """The requested ranks."""
        return self.tp if self.pcp is None else self.pcp

    @property
    def option(self) -> str:
        """The one that asks for them."""
        return "--tp" if self.pcp is None else "--pcp"

    def check(self, drafting: Drafting, *, watched: bool) -> None:
        """Raise InvalidInput for options that exclude each other, or that one rank has no use for.

        watched: whether the reference watches steps, or failures are kept.
        """
        self._check_pcp(watched=watched)
        for option, is_set in (("--dcp", self.dcp), ("--dp-attention", self.dp_attention)):
            if is_set and self._is_alone():
                raise InvalidInput(option, got="1 rank", expected="--tp with 2 ranks or more")
        if self.dp_attention and self.dcp:
            expected = "one of the two: with --dp-attention each rank keeps its own requests' KV"
            raise InvalidInput("--dcp", got="--dp-attention too", expected=expected)
        if self.dp_attention and drafting.draft is not None:
            expected = "no drafts: ranks with requests of their own verify none"
            raise InvalidInput("--draft", got="--dp-attention too", expected=expected)

    def _is_alone(self) -> bool:
        from torch.distributed import is_torchelastic_launched  # noqa: PLC0415  # slow

        return self.tp == 1 or (self.tp is None and not is_torchelastic_launched())

    def _check_pcp(self, *, watched: bool) -> None:
        others = {"tp": self.tp is not None, "dcp": self.dcp, "dp-attention": self.dp_attention}
        if self.pcp is not None and any(others.values()):
            expected = "--pcp alone, where each device has the whole model and all K and V"
            got = " and ".join(f"--{option}" for option, is_set in others.items() if is_set)
            raise InvalidInput("--pcp", got=f"{got} too", expected=expected)
        if self.pcp is not None and watched:
            expected = "1 rank for these: a rank sees a part of a split step"
            raise InvalidInput("--pcp", got="--canary or --keep-failures too", expected=expected)
        if self.pcp is None and self.pcp_min_tokens is not None:
            expected = "--pcp, whose prompts it splits"
            raise InvalidInput("--pcp-min-tokens", got=self.pcp_min_tokens, expected=expected)

    def start(self, run: Run) -> None:
        """Start the requested ranks, unless this process is one of them, and exit with their
        status. Raises InvalidInput without attnmux-distributed."""
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
        """This process's place among the ranks."""
        from torch.distributed import is_torchelastic_launched  # noqa: PLC0415  # slow

        if not is_torchelastic_launched():
            return ONE_RANK
        try:
            from attnmux.transformers.parallel import (  # noqa: PLC0415  # an extra
                data_parallel,
                launch,
                prefill,
                ranks,
            )
        except ModuleNotFoundError as error:
            raise self._missing(error) from error
        group = launch.join(device_type, self.size, self.option)
        if self.pcp is not None:
            return prefill.PrefillParallelRanks(group, least_tokens=self.pcp_min_tokens)
        if self.dp_attention:
            return data_parallel.DataParallelRanks(group)
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
        except (RankError, NoBackend, InvalidInput) as error:
            is_own = isinstance(error, InvalidInput) and error.argument not in OF_THE_MODEL
            if is_own or (isinstance(error, RankError) and not error.is_on_every_rank):
                raise
            raise click.exceptions.Exit(1) from error
