"""What starts a real server is marked, so that `make test` needs none; and the Makefile leaves out what is marked."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from tests.marks import MARKED_FIXTURES

ROOT = Path(__file__).parents[2]

STARTERS = frozenset(
    {
        *("LiveCluster", "LiveServer", "LiveStore", "S3Server", "SERVERS"),
        *("open_backend", "open_browser", "two_hosts"),
    }
)
"""What starts a server, a browser or several hosts where it is called."""

MODULES = [path for path in (ROOT / "tests").rglob("test_*.py") if "vllm" not in path.parts]


def starters_in(tree: ast.AST) -> set[str]:
    """Return those that a module calls, be it as ``SERVERS[name](...)``. Pure."""
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    bases = (func.value if isinstance(func, ast.Subscript) else func for func in called)
    return {base.id for base in bases if isinstance(base, ast.Name)} & STARTERS


def marks_in(tree: ast.AST) -> set[str]:
    """Return the names of pytest's marks in a module. Pure."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    }


def is_marked_or_in_marked_fixtures(tree: ast.Module) -> bool:
    """Return whether a module names the mark, or starts servers only for fixtures that bring it. Pure."""
    if "servers" in marks_in(tree):
        return True
    outside = [
        node
        for node in tree.body
        if not (isinstance(node, ast.FunctionDef) and node.name in MARKED_FIXTURES["servers"])
    ]
    return not starters_in(ast.Module(outside, []))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_that_starts_a_server_is_marked(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))

    assert is_marked_or_in_marked_fixtures(tree), (
        f"it calls {', '.join(sorted(starters_in(tree)))}: add pytestmark = pytest.mark.servers"
    )


def test_an_unmarked_start_is_seen() -> None:
    module = "def test_it():\n    server = SERVERS['obj'](order)\n    LiveStore()\n"

    assert starters_in(ast.parse(module)) == {"SERVERS", "LiveStore"}
    assert not is_marked_or_in_marked_fixtures(ast.parse(module))
    assert is_marked_or_in_marked_fixtures(ast.parse(f"pytestmark = pytest.mark.servers\n{module}"))


def test_make_test_leaves_out_exactly_the_marks_that_say_so() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    lines = options["ini_options"]["markers"]
    promised = {line.partition(":")[0] for line in lines if line.endswith("not in make test")}

    left_out = re.search(r"-m 'not \((.*)\)'", (ROOT / "Makefile").read_text(encoding="utf-8"))

    assert left_out is not None
    assert set(left_out[1].split(" or ")) == promised >= set(MARKED_FIXTURES)
