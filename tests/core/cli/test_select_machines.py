"""`attnmux select` with several machines, with odd models, and completed by a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from attnmux.core.cli.verbs import verbs

MAIN = "from attnmux.core.cli import main; main()"
H100, CPU = "nvidia:sm90,cuda=12.8", "cpu:x86_64"
ASKED = ("--request", "dtype=bf16,head_dim=128")


def call(*args: str):
    return CliRunner().invoke(verbs, ["select", *args], prog_name="attnmux")


@pytest.fixture(autouse=True)
def plugins() -> None:
    pytest.importorskip("attnmux.cpu.plugin")


def test_a_row_for_each_machine() -> None:
    result = call("--platform", H100, "--platform", CPU, *ASKED)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()[1:]
    assert first.split()[0] == H100
    assert second.split()[:3] == [CPU, "torch_native", "torch_native"]


def test_the_answers_are_those_of_one_machine_each() -> None:
    both = json.loads(call("--platform", H100, "--platform", CPU, *ASKED, "--json").stdout)
    assert set(both) == {"machines", "warnings"}
    for platform, answer in zip((H100, CPU), both["machines"], strict=True):
        alone = json.loads(call("--platform", platform, *ASKED, "--json").stdout)
        del alone["warnings"]
        assert answer == alone


def test_one_machine_without_a_backend_is_status_3() -> None:
    wanted = (*ASKED, "--backend", "flex_attention")
    result = call("--platform", CPU, "--platform", H100, *wanted)
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert lines[1].split()[0] == CPU
    assert "flex_attention" in lines[2] or "flex_attention" in "".join(lines[2:])


def test_explain_takes_one_machine() -> None:
    result = call("--platform", H100, "--platform", CPU, "--explain")
    assert result.exit_code == 2
    assert "expected one" in result.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_model_that_is_a_pipe_is_refused_at_once(tmp_path) -> None:
    pipe = tmp_path / "model"
    os.mkfifo(pipe)
    result = call("--model", str(pipe))
    assert result.exit_code == 2
    assert "no regular file" in result.stderr


def test_a_model_with_an_endless_name_is_one_sentence() -> None:
    result = call("--model", "x" * 5000)
    assert result.exit_code == 2
    assert len(result.stderr) < 500
    assert result.stderr.startswith("attnmux: model: expected a folder")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
@pytest.mark.parametrize("verb", [["select", "--json"], ["select", "--explain"], ["backends"]])
def test_a_full_disk_is_one_sentence(verb) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *verb],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert said == ["attnmux: the answer cannot be written: [Errno 28] No space left on device"]


def test_a_plain_answer_in_json_imports_neither_rich_nor_torch() -> None:
    """A hidden use would cost every start milliseconds."""
    code = (
        "import sys; from attnmux.core.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "slow = {'rich', 'torch'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    args = ["select", "--json", "--platform", "nvidia:sm90,cuda=12.8"]
    for _ in range(2):  # the first may fill the cache of offers
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "backends"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    said = done.stderr
    assert done.returncode == 1
    assert "Traceback" not in said
    assert "ended early" not in said


@pytest.mark.skipif(os.name == "nt", reason="a folder in use stays")
def test_a_deleted_working_directory_is_one_sentence(tmp_path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); {MAIN}"
    done = subprocess.run(
        [sys.executable, "-c", code, "select"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "the working directory was deleted" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shell_completes_verbs() -> None:
    asked = {"_ATTNMUX_COMPLETE": "bash_complete", "COMP_WORDS": "attnmux sel", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[0] = 'attnmux'; {MAIN}"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["plain,select"]), done.stderr
