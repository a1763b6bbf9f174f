"""Checks the limits of CONTRIBUTING.md on the project's Python: lengths, branches, docstrings, types, names, words.

Each file is parsed once and not imported. A rule is a function from a parsed file to findings; a rule of the package
is a function from all files of src, because it follows base classes and imports from file to file. All rules apply to
src, scripts and benchmarks. Only the rules of length, debts and names apply to tests, because a test's name is its
docstring and a suite is as large as its contract.

    python -m scripts.style_limits            the project; exit status 1 when a limit is broken
    python -m scripts.style_limits PATH ...   these files and folders instead
"""

import argparse
import ast
import functools
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeGuard

from scripts.style_words import find_words

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_BRANCHES = 12
MAX_METHODS = 40
"""Limit for what a class defines itself, each name once. What it inherits and does not override does not count."""

MIN_FILE_LINES = 60
MIN_IMPORTERS = 3
"""A shorter file needs that many importers, or implements a contract; otherwise it belongs into its importer."""

CONTRACT_FOLDERS = ("cpu/policies", "cpu/cuda", "sim/formats", "tiering/kit", "testing")
"""Their files implement a contract, or are one, and are found by name, so they may be short."""

MEDIAN_FILE_LINES = 180
"""An aim, reported and not enforced: a tree of small files must be searched."""

MEDIAN_FUNCTION_LINES = 8
"""An aim, reported and not enforced."""

FOLDERS = ("src", "scripts", "benchmarks", "examples", "tests")
HOMELESS_NAMES = frozenset({"utils", "util", "helpers", "helper", "misc", "common_utils"})
INIT_WITH_LOGIC = "kvtier/tiering/example/__init__.py"
"""The tier to copy from is a single file on purpose, so its package is its module."""

DEBT = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
BROAD_MARK = re.compile(r"#.*\b(thread top|foreign)\b")
"""A handler of every exception is allowed where no caller could handle it (the top of a thread's loop), and around
foreign code whose failure must cost only its own job."""

BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.AsyncFor,
    ast.ExceptHandler,
    ast.IfExp,
    ast.BoolOp,
    ast.match_case,
)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One broken limit.

    Attributes:
        path: the file.
        line: number of the line, from 1.
        message: what was found and what is allowed.
    """

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class Scope:
    """A function and its surroundings.

    Attributes:
        node: its definition.
        name: dotted with the classes around it.
        is_method: whether a class is directly around it.
        is_public: whether no part of the name begins with an underscore.
    """

    node: Function
    name: str
    is_method: bool
    is_public: bool

    @property
    def num_lines(self) -> int:
        """Lines from ``def`` to the end, docstring left out, nested functions included."""
        length = _num_lines(self.node)
        return length - _num_lines(self.node.body[0]) if _has_docstring(self.node) else length

    @property
    def num_branches(self) -> int:
        """One, and one more for each branch."""
        return 1 + sum(isinstance(inner, BRANCHES) for inner in ast.walk(self.node))


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file.

    Attributes:
        path: the file.
        text: its content.
        tree: its syntax tree.
        scopes: its functions; nested ones count as part of the outer one.
        is_test: whether only the short list of rules applies.
    """

    path: Path
    text: str
    tree: ast.Module
    scopes: tuple[Scope, ...]
    is_test: bool

    @property
    def module(self) -> str:
        """The dotted name under which a file of src is imported, "" for any other file."""
        parts = self.path.with_suffix("").parts
        if "src" not in parts:
            return ""
        inside = parts[parts.index("src") + 1 :]
        return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


Package: TypeAlias = Mapping[str, Source]
"""The files of src by the name of their module."""

Rule: TypeAlias = Callable[[Source], Iterable[Finding]]
PackageRule: TypeAlias = Callable[[Package], Iterable[Finding]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every broken limit and the medians; return 1 when a limit is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders, by default the project's")
    paths = parser.parse_args(arguments).paths or [Path(name) for name in FOLDERS if Path(name).is_dir()]
    sources = [read_source(path) for path in python_files(paths)]
    findings = sorted({*check_package(sources), *(found for source in sources for found in check(source))})
    for finding in findings:
        print(finding)
    print(medians(sources))
    return int(bool(findings))


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files at and under ``paths``, without those of hidden folders."""
    for path in paths:
        if path.is_file():
            yield path
        else:
            found = sorted(path.rglob("*.py"))
            yield from (file for file in found if not _is_hidden(file.relative_to(path)))


def read_source(path: Path) -> Source:
    """Read and parse one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=str(path))
    is_test = "tests" in path.parts
    return Source(path, text, tree, tuple(_scopes_in(tree.body)), is_test)


def check(source: Source) -> list[Finding]:
    """Return every limit that ``source`` breaks. Pure."""
    rules = SIZE_RULES if source.is_test else (*SIZE_RULES, *PROSE_RULES)
    return [finding for rule in rules for finding in rule(source)]


def check_package(sources: Sequence[Source]) -> list[Finding]:
    """Return every limit that the files of src break together. Pure."""
    package = {name: source for source in sources if (name := source.module)}
    return [finding for rule in PACKAGE_RULES for finding in rule(package)]


def medians(sources: Sequence[Source]) -> str:
    """Return one line with the medians of what ships, beside their aims."""
    shipped = [source for source in sources if not source.is_test and source.text.strip()]
    files = [len(source.text.splitlines()) for source in shipped]
    functions = [scope.num_lines for source in shipped for scope in source.scopes]
    return (
        f"{len(sources)} files, tests included; of the others: "
        f"median file {_median(files)} lines (aim {MEDIAN_FILE_LINES}), longest {max(files, default=0)}; "
        f"median function {_median(functions)} lines (aim {MEDIAN_FUNCTION_LINES}), "
        f"longest {max(functions, default=0)}"
    )


def check_file_length(source: Source) -> Iterator[Finding]:
    """A file that is too long to remember has two subjects."""
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield Finding(source.path, MAX_FILE_LINES + 1, f"file of {num_lines} lines, at most {MAX_FILE_LINES}")


def check_function_size(source: Source) -> Iterator[Finding]:
    """A function does one thing, so it is short and has few branches."""
    at = functools.partial(Finding, source.path)
    for scope in source.scopes:
        if scope.num_lines > MAX_FUNCTION_LINES:
            message = f"{scope.name} has {scope.num_lines} lines, at most {MAX_FUNCTION_LINES}"
            yield at(scope.node.lineno, message)
        if scope.num_branches > MAX_BRANCHES:
            message = f"{scope.name} has {scope.num_branches} branches, at most {MAX_BRANCHES}"
            yield at(scope.node.lineno, message)


def check_debts(source: Source) -> Iterator[Finding]:
    """Work that is not done is an issue, not a comment."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and DEBT.search(token.string):
            yield Finding(source.path, token.start[0], f"debt in a comment: {token.string}")


def check_words(source: Source) -> Iterator[Finding]:
    """Comments, docstrings and messages are plain sentences: subject, verb, object."""
    for line, phrase in find_words(source.path, source.text):
        yield Finding(source.path, line, f"{phrase!r} in prose: name who does what")


def check_module_name(source: Source) -> Iterator[Finding]:
    """A module is named after its subject."""
    if source.path.stem.removeprefix("test_") in HOMELESS_NAMES:
        yield Finding(source.path, 1, f"{source.path.name} does not name what is in it: name the subject")


def check_class_size(package: Package) -> Iterator[Finding]:
    """A class of many methods is several classes."""
    for (module, name), found in _classes(package).items():
        methods = _methods(found.node)
        if len(methods) > MAX_METHODS:
            message = f"{name} has {len(methods)} methods, at most {MAX_METHODS}"
            yield Finding(package[module].path, found.node.lineno, message)


def check_overrides(package: Package) -> Iterator[Finding]:
    """An override inherits the docstring of its contract; every other public method has one of its own."""
    classes = _classes(package)
    for (module, _), found in classes.items():
        inherited = set().union(*(_methods(one.node) for one in _ancestors(found, classes)))
        at = functools.partial(Finding, package[module].path)
        for item in filter(_is_function, found.node.body):
            if item.name in inherited and _has_docstring(item):
                yield at(item.lineno, f"{found.node.name}.{item.name} overrides: it inherits its docstring")
            elif _needs_docstring(found.node, item, inherited):
                yield at(item.lineno, f"{found.node.name}.{item.name} without a docstring")


def check_short_files(package: Package) -> Iterator[Finding]:
    """A short file with few importers makes a reader open one more file; one that only re-exports keeps a name."""
    importers = _importers(package)
    for module, source in package.items():
        num_lines, num_importers = len(source.text.splitlines()), len(importers.get(module, ()))
        is_program = source.path.name == "__main__.py" or 'if __name__ == "__main__":' in source.text
        is_exempt = (
            source.path.name == "__init__.py"
            or is_program
            or _only_re_exports(source.tree)
            or any(source.path.parent.as_posix().endswith(folder) for folder in CONTRACT_FOLDERS)
        )
        if num_lines < MIN_FILE_LINES and num_importers < MIN_IMPORTERS and not is_exempt:
            message = f"file of {num_lines} lines with {num_importers} importers: move it into one of them"
            yield Finding(source.path, 1, message)


def _only_re_exports(tree: ast.Module) -> bool:
    """Return whether a module has its docstring, imports and the list of its names, and nothing else. Pure."""
    own = [one for one in tree.body[1:] if not isinstance(one, ast.Import | ast.ImportFrom)]
    return bool(own) and all(isinstance(one, ast.Assign) and _names_all(one) for one in own)


def _names_all(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["__all__"]


def check_docstrings(source: Source) -> Iterator[Finding]:
    """Modules, public classes and public functions have a docstring."""
    if source.text.strip() and not _has_docstring(source.tree):
        yield Finding(source.path, 1, "module without a docstring")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not _has_docstring(node):
            yield Finding(source.path, node.lineno, f"class {node.name} without a docstring")
    for scope in source.scopes:
        is_checked_with_bases = scope.is_method and bool(source.module)
        is_shipped_test = scope.node.name.startswith("test_")  # its name is its sentence
        is_bare = scope.is_public and not _has_docstring(scope.node)
        if is_bare and not is_shipped_test and not is_checked_with_bases:
            yield Finding(source.path, scope.node.lineno, f"{scope.name} without a docstring")


def check_types(source: Source) -> Iterator[Finding]:
    """The signature of a function has every type."""
    for scope in source.scopes:
        if not _is_typed(scope):
            yield Finding(source.path, scope.node.lineno, f"{scope.name} is not fully annotated")


def check_broad_excepts(source: Source) -> Iterator[Finding]:
    """A handler of every exception hides bugs, except in the two marked places."""
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler) or not _is_broad(node):
            continue
        if not BROAD_MARK.search(lines[node.lineno - 1]):
            message = (
                "takes every exception: name the class, raise again, or mark it `# thread top` "
                "or, around foreign code, `# foreign ...`"
            )
            yield Finding(source.path, node.lineno, message)


def check_init(source: Source) -> Iterator[Finding]:
    """A package's ``__init__`` holds a docstring and re-exports."""
    if source.path.name != "__init__.py" or source.path.as_posix().endswith(INIT_WITH_LOGIC):
        return
    for node in source.tree.body:
        if not _is_re_export(node):
            yield Finding(source.path, node.lineno, "logic in __init__.py: a docstring and re-exports only")


SIZE_RULES: tuple[Rule, ...] = (check_file_length, check_function_size, check_debts, check_module_name)
PROSE_RULES: tuple[Rule, ...] = (check_docstrings, check_types, check_broad_excepts, check_init, check_words)
PACKAGE_RULES: tuple[PackageRule, ...] = (check_class_size, check_overrides, check_short_files)


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of the package and the names of its bases, each as (module, class) where it is known."""

    node: ast.ClassDef
    bases: tuple[tuple[str, str], ...]


_Classes: TypeAlias = dict[tuple[str, str], _Class]


def _classes(package: Package) -> _Classes:
    found: _Classes = {}
    origins = {module: _imported_names(source) for module, source in package.items()}
    for module, source in package.items():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0] for base in node.bases]
                bases = tuple(_home(module, name, origins) for name in names)
                found[module, node.name] = _Class(node, bases)
    return found


def _home(module: str, name: str, origins: Mapping[str, Mapping[str, tuple[str, str]]]) -> tuple[str, str]:
    """Return the module that defines a name and its name there; modules in between re-export it."""
    while name in origins.get(module, ()):
        module, name = origins[module][name]
    return module, name


def _ancestors(found: _Class, classes: _Classes) -> list[_Class]:
    """Every base of the package, nearest first, and theirs."""
    parents = [classes[base] for base in found.bases if base in classes]
    return [one for parent in parents for one in (parent, *_ancestors(parent, classes))]


def _methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, Function) and _is_method(item)}


def _is_function(item: ast.stmt) -> TypeGuard[Function]:
    return isinstance(item, Function)


def _needs_docstring(owner: ast.ClassDef, item: Function, inherited: Collection[str]) -> bool:
    if not _is_method(item) or _has_docstring(item):
        return False
    names = (owner.name, item.name)
    return item.name not in inherited and not any(name.startswith("_") for name in names)


def _imported_names(source: Source) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _importers(package: Package) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, source in package.items():
        for target, name in _imported_names(source).values():
            for imported in (target, f"{target}.{name}"):
                if imported in package and imported != module:
                    found.setdefault(imported, set()).add(module)
    return found


def _scopes_in(body: Iterable[ast.stmt], prefix: str = "", *, is_public: bool = True) -> Iterator[Scope]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            shown = is_public and not node.name.startswith("_")
            yield from _scopes_in(node.body, f"{prefix}{node.name}.", is_public=shown)
        elif isinstance(node, Function):
            if not _is_overload(node):
                shown = is_public and not node.name.startswith("_")
                yield Scope(node, prefix + node.name, bool(prefix), shown)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _scopes_in(_statements_under(node), prefix, is_public=is_public)


def _statements_under(node: ast.If | ast.Try | ast.With) -> list[ast.stmt]:
    arms = [node.body]
    if not isinstance(node, ast.With):
        arms.append(node.orelse)
    if isinstance(node, ast.Try):
        arms += [node.finalbody, *(handler.body for handler in node.handlers)]
    return [statement for arm in arms for statement in arm]


def _is_method(item: ast.stmt) -> bool:
    """Overloads are one method, and a shipped suite has as many tests as its contract has sentences."""
    return isinstance(item, Function) and not item.name.startswith("test_") and not _is_overload(item)


def _is_overload(node: Function) -> bool:
    return any(ast.unparse(decorator).split(".")[-1] == "overload" for decorator in node.decorator_list)


def _is_typed(scope: Scope) -> bool:
    arguments = scope.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in scope.node.decorator_list)
    if scope.is_method and not is_static:
        positional = positional[1:]
    variable = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    has_return = scope.node.returns is not None or scope.node.name == "__init__"
    return has_return and all(one.annotation for one in (*positional, *arguments.kwonlyargs, *variable))


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def _is_re_export(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Try):  # names the missing extra
        return all(isinstance(item, ast.Import) for item in node.body)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return isinstance(node.value, ast.Constant | ast.List | ast.Tuple)
    return False


def _has_docstring(node: ast.Module | ast.ClassDef | Function) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) or part.endswith(".egg-info") for part in path.parts)


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values)) if values else 0


if __name__ == "__main__":
    sys.exit(main())
