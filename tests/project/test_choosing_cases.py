"""What goes wrong elsewhere when a backend is chosen: each case decided, refused or told here.

Where a plugin is wrong, it is a distribution of its own and the command runs in another process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import (
    Decision,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
    Plugins,
    Policy,
    Request,
    solve,
)
from attnmux.core.cli.verbs import verbs
from attnmux.core.find import unserved

DENSE = "dtype=bf16,head_dim=128,num_q_heads=32,num_kv_heads=8"
LATENT = "kind=mla,dtype=bf16,num_q_heads=16,kv_lora_rank=512,qk_rope_head_dim=64"
FIRST = """
from attnmux.core.cards.card import Clause
from attnmux.core.plugin import BackendCard, Prior
from attnmux.core.plugin import ANY
from attnmux.core.plugin import hookimpl

@hookimpl
def attnmux_cards():
    serves = dict.fromkeys(Clause.__dataclass_fields__, ANY)
    return [BackendCard(
        name="swift", summary="wins wherever it may", factory="swift:Backend",
        contract={contract!r}, clauses=(Clause(**serves),),
        priors=(Prior(rank=0, source="says so itself"),),
    )]
"""
"""A plugin whose one card takes everything, at the best rank there is."""
COMMAND = "from attnmux.core.cli import main; main()"
CHECK = """
import pathlib, sys
from attnmux.core import Decision
from attnmux.core import Plugins
from attnmux.core.find.cpu import probe_cpu

decision = Decision.from_json(pathlib.Path(sys.argv[1]).read_text())
decision.check(probe_cpu(), Plugins.load().offers())
"""
"""What a rank does with the decision that the launcher wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A folder of distributions in addition to the installed ones."""

    path: Path

    def install(
        self, plugin: str, source: str, *, distribution: str = "", version: str = "1.0"
    ) -> None:
        name = distribution or f"dist-{plugin}"
        module = f"{name.replace('-', '_')}_module"
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (self.path / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[attnmux]\n{plugin} = {module}\n")

    def python(self, code: str, *args: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ATTNMUX_")}
        path = os.pathsep.join(filter(None, [str(self.path), kept.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            capture_output=True,
            text=True,
            cwd=self.path,
            env={**kept, "PYTHONPATH": path, "COLUMNS": "200"},
            timeout=60,
            check=False,
        )

    def attnmux(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.python(COMMAND, *args)


@pytest.fixture
def new_site(tmp_path) -> Callable[[str], Site]:
    def make(name: str) -> Site:
        (tmp_path / name).mkdir()
        return Site(path=tmp_path / name)

    return make


@pytest.fixture
def site(new_site) -> Site:
    return new_site("site")


@pytest.fixture(scope="module")
def offers() -> tuple[Offer, ...]:
    return Plugins.load().offers()


@pytest.fixture
def choose(offers) -> Callable[..., Decision]:
    """(platform, request, what the policy names) → the decision."""

    def call(platform: str, asked: str, **named: object) -> Decision:
        policy = Policy(**named)
        return solve(Request.parse(asked), Platform.parse(platform), offers, policy)

    return call


def backends(decision: Decision) -> dict[str, str]:
    return {phase: choice.backend for phase, choice in decision.phases.items()}


def reasons(refusal: NoBackend, backend: str, phase: str) -> list[tuple[str, str]]:
    """(code, hint) of each reason of the backend there."""
    return [
        (reason.code, reason.hint)
        for verdict in refusal.candidates
        if (verdict.backend, verdict.phase) == (backend, phase)
        for reason in verdict.reasons
    ]


@pytest.mark.parametrize("leaving", ["raise SystemExit(3)", "import sys; sys.exit()"])
def test_a_plugin_that_exits_when_imported_is_a_warning_and_the_rest_is_chosen_among(
    site, leaving
) -> None:
    site.install("rude", leaving)
    done = site.attnmux(
        "select", "--json", "--platform", "nvidia:sm90,cuda=13.0", "--request", DENSE
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["phases"]["extend"]["backend"] == "fa3"
    (warning,) = answer["warnings"]
    assert "plugin rude (dist-rude 1.0): SystemExit" in warning
    assert warning in done.stderr


def test_a_plugin_name_in_two_distributions_is_refused_until_one_is_chosen(site) -> None:
    for distribution in ("dist-one", "dist-two"):
        site.install("same", FIRST.format(contract=">=1,<2"), distribution=distribution)
    asked = ("select", "--json", "--platform", "cpu:x86_64", "--request", DENSE)
    answer = json.loads(site.attnmux(*asked).stdout)
    assert answer["phases"]["decode"]["backend"] == "torch_native"
    assert len(answer["warnings"]) == 2
    assert all("belongs to dist-one and dist-two" in text for text in answer["warnings"])
    (site.path / "attnmux.toml").write_text('deny_plugins = ["dist-two"]\n')
    decided = json.loads(site.attnmux(*asked).stdout)["phases"]["decode"]
    assert (decided["backend"], decided["distribution"]) == ("swift", "dist-one")


def test_a_backend_name_of_two_plugins_needs_its_plugin_in_front(site) -> None:
    for plugin in ("one", "two"):
        site.install(plugin, FIRST.format(contract=">=1,<2"))
    asked = ("select", "--json", "--platform", "cpu:x86_64", "--request", DENSE, "--backend")
    refused = site.attnmux(*asked, "swift")
    assert refused.returncode == 2
    assert "one/swift, two/swift" in refused.stderr
    decided = json.loads(site.attnmux(*asked, "two/swift").stdout)["phases"]["decode"]
    assert (decided["backend"], decided["plugin"]) == ("swift", "two")


def test_a_plugin_for_another_contract_is_out_with_a_reason_whatever_its_rank(site) -> None:
    site.install("stale", FIRST.format(contract=">=0,<1"))
    asked = ("select", "--json", "--platform", "cpu:x86_64", "--request", DENSE)
    answer = json.loads(site.attnmux(*asked).stdout)
    assert answer["phases"]["decode"]["backend"] == "torch_native"
    (reason,) = next(row for row in answer["candidates"] if row["backend"] == "swift")["reasons"]
    assert (reason["code"], reason["wanted"], reason["offered"]) == (
        "CONTRACT",
        "one of 1.0",
        ">=0,<1",
    )
    named = site.attnmux(*asked, "--backend", "swift")
    assert named.returncode == 3
    assert "swift cannot serve" in named.stderr


@pytest.mark.parametrize(
    ("named", "backend", "phase"),
    [
        ({"backend": "flex_attention"}, "flex_attention", "decode"),
        (
            {"prefill_backend": "flex_attention", "decode_backend": "flex_attention"},
            "flex_attention",
            "decode",
        ),
        ({"prefill_backend": "flex_attention"}, "flex_attention", "extend"),
        ({"decode_backend": "trtllm_mha"}, "trtllm_mha", "decode"),
        ({"backend": "fa3", "decode_backend": "trtllm_mha"}, "trtllm_mha", "decode"),
    ],
)
def test_determinism_is_asked_of_every_phase_however_the_flag_was_spelled(
    choose, named, backend, phase
) -> None:
    with pytest.raises(NoBackend) as caught:
        choose("nvidia:sm90", f"{DENSE},page_size=64,deterministic=true", **named)
    assert reasons(caught.value, backend, phase) == [("DETERMINISTIC", "deterministic=none")]
    assert backend in set(
        backends(choose("nvidia:sm90", f"{DENSE},page_size=64", **named)).values()
    )


def test_flashmla_for_prefill_alone_does_not_slip_past_its_page_size(choose) -> None:
    asked = f"{LATENT},page_size=16"
    with pytest.raises(NoBackend) as caught:
        choose("nvidia:sm90", asked, prefill_backend="flashmla")
    # No page size makes it prefill
    assert reasons(caught.value, "flashmla", "extend") == [("PHASE", ""), ("PAGE_SIZE", "")]


@pytest.mark.parametrize("field", ["backend", "decode_backend"])
def test_flashmla_s_page_size_is_asked_for_or_refused_and_never_replaced(choose, field) -> None:
    named = {field: "flashmla", "prefill_backend": "flashinfer_mla"}
    with pytest.raises(NoBackend) as caught:
        choose("nvidia:sm90", f"{LATENT},page_size=16", **named)
    assert reasons(caught.value, "flashmla", "decode") == [("PAGE_SIZE", "page_size=64")]
    open_ended = choose("nvidia:sm90", LATENT, **named)
    assert (open_ended.page_size, open_ended.coercions) == (64, ())


@pytest.mark.parametrize("consent", [False, True])
def test_fa4_beside_trtllm_mha_is_refused_under_a_page_of_32_and_of_128(choose, consent) -> None:
    named = {
        "prefill_backend": "fa4",
        "decode_backend": "trtllm_mha",
        "allow_coercion": consent,
    }
    with pytest.raises(NoBackend) as caught:
        choose("nvidia:sm100", f"{DENSE},page_size=32", **named)
    # Pages of 128 would not help
    assert reasons(caught.value, "fa4", "extend") == [("PAGE_SIZE", ""), ("EXCLUDED", "")]
    with pytest.raises(NoBackend, match="never shares a KV cache with trtllm_mha") as caught:
        choose("nvidia:sm100", f"{DENSE},page_size=128", **named)
    assert reasons(caught.value, "fa4", "extend") == [("EXCLUDED", "")]


def test_a_user_s_page_of_32_becomes_128_only_with_consent_and_on_the_record(choose) -> None:
    named = {"prefill_backend": "fa4", "decode_backend": "flashinfer"}
    with pytest.raises(NoBackend) as caught:
        choose("nvidia:sm100", f"{DENSE},page_size=32", **named)
    assert reasons(caught.value, "fa4", "extend") == [("PAGE_SIZE", "page_size=128")]
    decision = choose("nvidia:sm100", f"{DENSE},page_size=32", **named, allow_coercion=True)
    assert decision.page_size == 128
    (change,) = decision.coercions
    assert (change.field, change.old, change.new, change.origin) == (
        "page_size",
        "32",
        "128",
        "user",
    )
    assert "fa4 for extend offers page_size 128" in change.because


def test_a_request_of_a_later_core_is_not_read_in_part() -> None:
    later = {**Request.parse(DENSE).to_dict(), "tree_width": 4}
    with pytest.raises(InvalidInput, match="tree_width"):
        Request.from_dict(later)


@pytest.mark.parametrize(
    ("backend", "platform", "request_", "offered"),
    [
        ("fa3", "nvidia:sm100", DENSE, ">=9.0,<10"),
        ("fa3", "nvidia:sm120", DENSE, ">=9.0,<10"),
        ("fa4", "nvidia:sm120", DENSE, ">=10.0,<11"),
        ("trtllm_mla", "nvidia:sm90", LATENT, ">=10.0,<11"),
        ("flashmla", "nvidia:sm100", LATENT, ">=9.0,<10"),
    ],
)
def test_a_named_backend_on_the_wrong_architecture_is_refused_before_any_kernel_runs(
    choose, backend, platform, request_, offered
) -> None:
    with pytest.raises(NoBackend) as caught:
        choose(platform, request_, backend=backend)
    said = [
        (reason.code, reason.offered)
        for verdict in caught.value.candidates
        if verdict.backend == backend
        for reason in verdict.reasons
    ]
    assert ("VERSION", offered) in said
    assert f"{backend} cannot serve" in str(caught.value)
    assert backend not in backends(choose(platform, request_)).values()


@pytest.fixture
def bare_machine(tmp_path, monkeypatch):
    """The command where an NVIDIA device is present and attnmux-nvidia is not installed."""
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    (root / "dev/nvidia0").touch()
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ATTNMUX_"):
            monkeypatch.delenv(name)
    everything = Plugins.load

    def loaded(**_: object):
        return everything(allow=("cpu",))

    versions = unserved.installed_version
    monkeypatch.setattr(Plugins, "load", loaded)
    monkeypatch.setattr(Plugins, "detect", partialmethod(Plugins.detect, root=root))
    monkeypatch.setattr(
        unserved, "installed_version", lambda name: None if "nvidia" in name else versions(name)
    )
    return lambda *args: CliRunner().invoke(verbs, args, prog_name="attnmux")


def test_a_device_without_its_plugin_is_said_loudly_with_the_line_that_mends_it(
    bare_machine,
) -> None:
    said = (
        "a device of nvidia is present (/dev/nvidia0) but attnmux-nvidia is not installed: "
        "pip install attnmux-nvidia"
    )
    result = bare_machine("select", "--json", "--request", DENSE)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["platform"]["vendor"] == "cpu"
    assert said in answer["warnings"]
    assert said in result.stderr
    refused = bare_machine("select", "--json", "--platform", "nvidia", "--request", DENSE)
    assert refused.exit_code == 2
    assert said in refused.stderr.splitlines()[-1]


def test_ranks_with_different_versions_of_a_plugin_differ_in_hash_and_refuse_to_go_on(
    new_site,
) -> None:
    asked = ("select", "--json", "--platform", "cpu", "--request", DENSE)
    ranks = [new_site(name) for name in ("launcher", "equal", "other")]
    for rank, version in zip(ranks, ("1.0", "1.0", "1.1"), strict=True):
        rank.install("swift", FIRST.format(contract=">=1,<2"), version=version)
    answers = [rank.attnmux(*asked).stdout for rank in ranks]
    launcher, equal, other = (json.loads(answer)["hash"] for answer in answers)
    assert launcher == equal != other
    written = ranks[0].path / "decision.json"
    written.write_text(answers[0])
    assert ranks[1].python(CHECK, str(written)).returncode == 0
    refused = ranks[2].python(CHECK, str(written))
    assert refused.returncode == 1
    assert "swift/swift: version 1.1 here, 1.0 in the decision" in refused.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_explaining_needs_no_torch(site, form) -> None:
    (site.path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: no such file')\n")
    assert site.python("import torch").returncode == 1
    done = site.attnmux(
        "select", "--explain", *form, "--platform", "nvidia:sm100", "--request", DENSE
    )
    assert done.returncode == 0, done.stderr
    assert "trtllm_mha" in done.stdout
    assert ">=9.0,<10" in done.stdout
