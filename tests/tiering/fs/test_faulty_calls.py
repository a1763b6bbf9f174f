"""A file is whole or absent, and the error the same, however the calls of the system end and whoever makes them.

Calls that move a part, nothing, or are interrupted, are real ones of another process: a library in front of the C
library shortens them, so that compiled calls meet them too.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.tiering.fs import faulty_calls
from tests.tiering.fs.faulty_calls import PUBLISH, READ, READING, Case, Ending, Way, publishing, read_endings

from kvtier.tiering.fs.system import REAL_CALLS

HERE = Path(__file__).parent
COMPILE_FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
HANG_GUARD_S = 120.0

Endings = Mapping[tuple[str, str], Ending]
"""What came of a case, by its name and by way."""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """Compile the library and try every case in a process that has it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("calls are shortened by a library that is compiled first: apt-get install gcc")
    folder = tmp_path_factory.mktemp("faulty")
    library, source = folder / "planned_calls.so", HERE / "planned_calls.c"
    subprocess.run([compiler, *COMPILE_FLAGS, "-o", str(library), str(source), "-ldl"], check=True)
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    done = subprocess.run(
        [sys.executable, str(faulty_calls.__file__), str(folder)],
        env=os.environ | {"LD_PRELOAD": " ".join(preloaded)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_GUARD_S,
        check=True,
    )
    return {(ending.case, ending.way): ending for ending in read_endings(done.stdout)}


def require(way: Way) -> None:
    """Skip what was not compiled."""
    if way.is_compiled and REAL_CALLS.whole_files is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )


@pytest.mark.parametrize(
    ("way", "case"),
    [pytest.param(way, case, id=f"{way.value}: {case.name}") for way in Way for case in publishing(way)],
)
def test_a_published_file_is_whole_or_absent(endings: Endings, case: Case, way: Way) -> None:
    require(way)
    has_failed = case.error is not None
    found = "none" if has_failed else "taken" if case.is_taken else "whole"
    name = f"{PUBLISH}: {case.name}"
    assert endings[name, way.value] == Ending(
        name,
        way.value,
        answer=None if has_failed else not case.is_taken,
        error=case.error,
        is_named=has_failed,
        bytes_found=found,
        mode=None if has_failed else case.mode_found,
        leftovers=["recycled"] if way.is_over and found != "whole" else [],
        num_open=0,
        num_left=0,
        is_released=True,
    )


@pytest.mark.parametrize("way", [Way.COMPILED, Way.STEPWISE], ids=lambda way: way.value)
@pytest.mark.parametrize("case", READING, ids=lambda case: case.name)
def test_a_file_is_read_whole_or_an_error_tells(endings: Endings, case: Case, way: Way) -> None:
    require(way)
    has_failed = case.error is not None
    name = f"{READ}: {case.name}"
    assert endings[name, way.value] == Ending(
        name,
        way.value,
        answer=None if has_failed else len(faulty_calls.WHOLE),
        error=case.error,
        is_named=has_failed,
        bytes_found="other" if has_failed else "whole",
        mode=0o600,
        leftovers=[],
        num_open=0,
        num_left=0,
        is_released=True,
    )
