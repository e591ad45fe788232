"""The names and signatures of an engine that its integration uses, checked against its sources.

Sources are read, not imported: the check costs no import of the engine, sees attributes that only a
constructor sets, and compares releases that are not installed.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from attnmux.core.facts.errors import AttnmuxError
from attnmux.core.facts.libraries import installed_version

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Interface:
    """A module's function, class, method or value that an integration uses."""

    module: str
    name: str = ""
    """"function", "Class", "Class.method" or "VALUE"; empty for the module alone."""
    parameters: tuple[str, ...] | None = None
    """Names that are passed, in their order, without `self` and `cls`; any other must have a
    default. None: it is not called."""
    attributes: tuple[str, ...] = ()
    """For a class: members, also inherited ones, and attributes that its methods set on `self`. For
    a function: attributes that it sets on its arguments."""
    overridden: bool = False
    """Whether the engine calls the integration's own method instead: `parameters` are its names.
    Each of the engine's must be among them, with a default or without."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


@dataclass(frozen=True, kw_only=True, slots=True)
class Integration:
    """The package that serves an engine, and its answer to an engine without its interfaces."""

    name: str
    """Its distribution: "attnmux-vllm"."""
    engine: Sequence[str]
    """The distributions that hold the engine's package, the usual one first."""
    remedy: str
    """An instruction to the user, such as "install vllm 0.33"."""
    warning: type[Warning]

    def misfit(self, interfaces: Iterable[Interface]) -> str:
        """A line with the interfaces that the installed engine lacks, and the remedy; empty if it
        lacks none."""
        gaps = missing(interfaces)
        if not gaps:
            return ""
        versions = ((name, installed_version(name)) for name in self.engine)
        installed = (f"{name} {version}" for name, version in versions if version)
        engine = next(installed, f"{self.engine[0]} (not from a package)")
        more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        return f"{self.name} cannot serve in {engine}, which lacks {gaps[0]}{more}: {self.remedy}"

    def fits(self, interfaces: Iterable[Interface]) -> bool:
        """Whether the installed engine has these interfaces. Warns if it lacks one."""
        text = self.misfit(interfaces)
        if text:
            warnings.warn(text, self.warning, stacklevel=3)
        return not text

    def require(self, interfaces: Iterable[Interface]) -> None:
        """Raises AttnmuxError unless the installed engine has these interfaces."""
        text = self.misfit(interfaces)
        if text:
            raise AttnmuxError(text)


def missing(interfaces: Iterable[Interface], folder: Path | None = None) -> list[str]:
    """Interfaces that the sources lack, a text for each gap; empty if everything is there.

    folder: the one that holds the engine's top package, such as site-packages; by default that of
    the installed package.
    """
    wanted = list(interfaces)
    folder = folder or _installed(wanted[0].module.partition(".")[0])
    sources = Sources(folder)
    return [gap for interface in wanted for gap in _gaps(interface, sources)]


def _installed(package: str) -> Path:
    """The folder that holds the installed package; an empty path if there is none."""
    spec = find_spec(package)
    return Path(spec.origin).parent.parent if spec and spec.origin else Path()


@dataclass(frozen=True, slots=True)
class Sources:
    """The modules below a folder, each parsed once."""

    folder: Path
    _parsed: dict[str, ast.Module | None] = field(default_factory=dict)

    def find(self, module: str, name: str) -> ast.AST | None:
        """The definition of a module's name; imports from modules below the folder are followed."""
        member = self._find(module, name)
        return None if member is None else member[1]

    def members(self, module: str, name: str) -> set[str]:
        """Names that a class has and sets, with its bases; names that a function sets."""
        member = self._find(module, name)
        if member is None:
            return set()
        home, node = member
        names = {
            part.attr
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        }
        if isinstance(node, ast.ClassDef):
            names |= {name for name, _ in _definitions(node.body)}
            for base in node.bases:
                names |= self.members(home, _plain_name(base))
        return names

    def _find(
        self, module: str, name: str, through: frozenset[tuple[str, str]] = frozenset()
    ) -> tuple[str, ast.AST] | None:
        """The definition and the module that it is in. through: imports that led here."""
        tree = self._module(module)
        if tree is None or (module, name) in through:
            return None
        if not name:
            return module, tree
        first, _, rest = name.partition(".")
        node = dict(_definitions(tree.body)).get(first)
        if isinstance(node, ast.ImportFrom):
            target = _target(node, module, is_package=self._path(module).name == "__init__.py")
            imported = next(a.name for a in node.names if (a.asname or a.name) == first)
            through |= {(module, name)}
            submodule = self._find(f"{target}.{imported}", rest, through)
            whole = f"{imported}.{rest}" if rest else imported
            return submodule or self._find(target, whole, through)
        if node is None or not rest:
            return None if node is None else (module, node)
        return self._member(module, node, rest) if isinstance(node, ast.ClassDef) else None

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        node = dict(_definitions(owner.body)).get(name)
        if node is not None:
            return module, node
        for base in owner.bases:
            inherited = self._find(module, f"{_plain_name(base)}.{name}")
            if inherited is not None:
                return inherited
        return None

    def _path(self, module: str) -> Path:
        base = self.folder.joinpath(*module.split("."))
        package = base / "__init__.py"
        return package if package.exists() else base.with_suffix(".py")

    def _module(self, module: str) -> ast.Module | None:
        if module not in self._parsed:
            path = self._path(module)
            self._parsed[module] = ast.parse(path.read_bytes()) if path.exists() else None
        return self._parsed[module]


def _gaps(interface: Interface, sources: Sources) -> Iterator[str]:
    node = sources.find(interface.module, interface.name)
    if node is None:
        yield str(interface)
        return
    if interface.attributes:
        members = sources.members(interface.module, interface.name)
        for name in interface.attributes:
            if name not in members:
                yield f"{interface}.{name}"
    if interface.parameters is not None:
        function = sources.find(interface.module, f"{interface.name}.__init__")
        called = function if isinstance(node, ast.ClassDef) else node
        if not isinstance(called, Function):
            yield f"{interface}({', '.join(interface.parameters)})"
            return
        names, required = _parameters(called.args)
        known = [name for name in names if name in interface.parameters]
        if interface.overridden:
            fits = names == [each for each in interface.parameters if each in names]
        else:
            fits = known == list(interface.parameters) and required <= set(known)
        if not fits:
            expected = f"({', '.join(interface.parameters)})"
            yield f"{interface}{expected}, which is ({', '.join(names)})"


def _parameters(arguments: ast.arguments) -> tuple[list[str], set[str]]:
    """All names in their order, and those without a default. `self` and `cls` are left out."""
    positional = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    required = set(positional[: len(positional) - len(arguments.defaults)])
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required |= {each.arg for each, default in keywords if default is None}
    names = [*positional, *(parameter.arg for parameter in arguments.kwonlyargs)]
    bound = {"self", "cls"}
    return [name for name in names if name not in bound], required - bound


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of all that a body defines, also below conditions; later ones win."""
    for node in body:
        if isinstance(node, Definition):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((name.id, node) for name in targets if isinstance(name, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from _definitions(getattr(node, block, ()))
        elif isinstance(node, ast.ExceptHandler):
            yield from _definitions(node.body)


def _target(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The absolute name of the module that an import reads."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _plain_name(base: ast.expr) -> str:
    """A base class without its type arguments."""
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
