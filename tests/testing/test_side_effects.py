"""Faults of the example vendor's backend that its answers do not show, as patches of its source.

The tests try a share of them, others in each run. `python tests/testing/test_side_effects.py` tries
all. Only fixed cases are run, which `attnmux verify` runs before its budget begins.
"""
# ruff: noqa: E501  # a patch is one row

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from random import SystemRandom

import torch

from attnmux.testing import run_case
from attnmux.testing.run.side_effects import SideEffects

if __name__ == "__main__":  # pytest has the folder in its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.testing.test_vendor_mutants import Mutant, candidate

PLACES = {
    "build": ("backend", "        self._attend = attend"),
    "prepare": ("backend", "        self._step = self._captured = None\n"),
    "call": ("backend", "        q, layer, lse = call.q, call.layer, call.lse"),
}
"""Where a statement is added: the module, and a line that comes before it."""


def _adds(place: str, statement: str) -> Mutant:
    module, line = PLACES[place]
    old, end = line.rstrip("\n"), "\n" * line.endswith("\n")
    return Mutant(
        name=f"{place}: {statement}",
        module=module,
        old=line,
        new=f"{old}\n        {statement}{end}",
    )


def _kept(value: str) -> str:
    """Adds a value to a list of the instance."""
    return f"self.__dict__.setdefault('_kept', []).append({value})"


THREAD = "__import__('threading').Thread(target=__import__('time').sleep, args=(20,), daemon=True).start()"
STATE = (
    ("build", "torch.manual_seed(0)"),
    ("prepare", "torch.manual_seed(0)"),
    ("call", "torch.rand(1)"),
    ("prepare", "torch.randperm(4)"),
    ("call", "__import__('random').random()"),
    ("build", "__import__('random').seed(1)"),
    ("call", "__import__('numpy').random.rand()"),
    ("build", "torch.set_num_threads(torch.get_num_threads() + 1)"),
    ("call", "torch.set_num_threads(torch.get_num_threads() + 1)"),
    ("build", "torch.set_grad_enabled(False)"),
    ("call", "torch.set_grad_enabled(False)"),
    ("prepare", "torch.set_grad_enabled(True)"),
    ("build", "self._mode = torch.inference_mode(); self._mode.__enter__()"),
    ("prepare", "torch.set_autocast_enabled('cpu', True)"),
    ("build", "torch.set_default_dtype(torch.float64)"),
    ("call", "torch.set_default_dtype(torch.float16)"),
    ("build", "torch.set_default_device('meta')"),
    ("build", "torch.use_deterministic_algorithms(True, warn_only=True)"),
    ("build", "torch.set_float32_matmul_precision('high')"),
    ("call", "torch.backends.cuda.matmul.allow_tf32 = True"),
    ("prepare", "torch.backends.cudnn.fp32_precision = 'tf32'"),
    ("build", "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False"),
    ("build", "torch.backends.cudnn.benchmark = True"),
    ("call", "torch.backends.cuda.enable_flash_sdp(False)"),
    ("build", "torch.set_flush_denormal(True)"),
    ("build", "torch.autograd.set_detect_anomaly(True)"),
    ("build", "__import__('os').environ['OMP_NUM_THREADS'] = '7'"),
    ("build", "__import__('os').environ['ACME_VISIBLE_DEVICES'] = '0'"),
    ("prepare", "__import__('os').environ['PATH'] += ':/opt/acme'"),
    ("prepare", "__import__('os').environ.pop('PATH', None)"),
    ("build", "__import__('warnings').simplefilter('ignore')"),
    ("call", "__import__('warnings').resetwarnings()"),
    ("build", "__import__('signal').signal(2, __import__('signal').SIG_IGN)"),
    ("build", "__import__('logging').disable(50)"),
    ("build", "__import__('logging').basicConfig(level=10, force=True)"),
    ("prepare", "__import__('gc').disable()"),
    ("build", "__import__('gc').set_threshold(100_000)"),
    ("build", "__import__('os').chdir('/')"),
)
GROWTH = (
    ("call", _kept("q")),
    ("call", _kept("call")),
    ("prepare", _kept("batch")),
    ("prepare", _kept("torch.zeros(1)")),
    ("prepare", _kept("b'x' * (4 << 20)")),
    ("prepare", _kept("[*range(1000, 2000)]")),
    ("prepare", _kept("__import__('os').dup(0)")),
    ("prepare", "self._log = torch.cat([getattr(self, '_log', torch.zeros(0)), torch.ones(64)])"),
    ("prepare", "self._for_graphs.append(Tables.make(batch.batch_size, self.context))"),
    ("prepare", "self.__dict__.setdefault('_plans', {})[tuple(batch.seq_lens.tolist())] = batch.seq_lens + 1"),
    ("prepare", THREAD),
    ("build", THREAD),
    ("build", "globals().setdefault('ALL', []).append(self)"),
    ("build", _kept("self") + "; globals().setdefault('ALL', {})[id(self)] = self"),
)  # fmt: skip
CALLERS = (
    ("prepare", "self.context.req_to_token_pool.req_to_token[0] += 1"),
    ("call", "call.k is not None and call.k.zero_()"),
    ("call", "self.context.token_to_kv_pool.get_value_buffer(layer.layer_id)[-1] = 1"),
)
SHARED = (
    ("lengths lie in the workspace", "kv_lens=zeros(max_batch_size)", "kv_lens=context.workspace.tensor('acme', (max_batch_size,), torch.int32)"),
    ("tables lie in the workspace", "zeros(max_batch_size, width)", "context.workspace.tensor('acme', (max_batch_size, width), torch.int32)"),
    ("lengths lie in the module", "kv_lens=zeros(max_batch_size)", "kv_lens=globals().setdefault('LENS', zeros(512))[:max_batch_size]"),
)  # fmt: skip

MUTANTS = (
    *(_adds(*row) for row in (*STATE, *GROWTH, *CALLERS)),
    *(Mutant(name=name, module="tables", old=old, new=new) for name, old, new in SHARED),
)
FIRST = "decode-uneven-page16", "steady-decode-page16", "steady-extend-page16"
"""Cases that are enough for all of them."""
SHARE = 12
"""Without `--full`, one in so many is tried."""


def first_failure(mutant: Mutant | None, names: Iterable[str] = FIRST) -> tuple[str, str]:
    """The first of some fixed cases that fails, and its message; "" if all pass."""
    suspect = candidate(mutant)
    cases = {case.name: case for case in suspect.cases((16,))}
    for name in names:
        outcome = run_case(suspect, cases[name])
        if outcome.status == "failed":
            return name, outcome.message
    return "", ""


def test_the_suite_finds_each_and_sets_the_state_back(full: bool) -> None:
    """Without `--full` a few are tried, others in each run."""
    start = SystemRandom().randrange(SHARE)
    for mutant in MUTANTS if full else MUTANTS[start::SHARE]:
        gc.collect()
        state = SideEffects(torch.device("cpu"))
        grad = torch.is_grad_enabled()
        name, message = first_failure(mutant)
        assert name, f"missed: {mutant.name}"
        gc.collect()
        # A mode that ends with its backend sets back the grad mode in which it began
        torch.set_grad_enabled(grad)
        with state.watch(f"the suite, after {mutant.name}: {message},"):
            pass


def test_a_failure_says_what_was_expected_and_what_to_do() -> None:
    _, message = first_failure(MUTANTS[0])
    assert message == (
        "building the backend changed torch's random state on the host: expected the state as "
        "before, got another one; draw from a generator of your own, made with a seed"
    )
    threads = torch.get_num_threads()
    more = _adds("call", "torch.set_num_threads(torch.get_num_threads() + 1)")
    _, message = first_failure(more)
    assert (
        f"step 1, DECODE: the step changed torch.get_num_threads(): expected {threads}" in message
    )
    _, message = first_failure(_adds("call", _kept("q")))
    assert "live tensors grow with each repetition" in message
    assert "keep no tensor and no batch of a step" in message


def test_the_whole_backend_passes() -> None:
    assert first_failure(None) == ("", "")


def test_every_patch_applies() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        candidate(mutant)


def main() -> None:
    """Try all, and print what caught each and when."""
    missed = 0
    for mutant in MUTANTS:
        start = time.monotonic()
        name, _ = first_failure(mutant)
        missed += not name
        seconds = time.monotonic() - start
        print(f"{seconds:7.1f} s  {mutant.name}: {name or 'MISSED'}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} caught")


if __name__ == "__main__":
    main()
