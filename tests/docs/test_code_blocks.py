"""Every Python block of README and docs runs as it stands, and leaves nothing in shared memory."""

import os
from pathlib import Path

import pytest

from scripts.check_docs import CodeBlock, pages, python_blocks

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself
BLOCKS = [block for page in pages(ROOT) for block in python_blocks(page)]


def name_of(block: CodeBlock) -> str:
    """Return the page and line of a block, for the test's name."""
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def regions() -> set[Path]:
    """Return the files in shared memory of this process's engines, whose names hold its id."""
    return set(SHARED_MEMORY.glob(f"kvtier_*-{os.getpid()}-*"))


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_a_block_runs_as_it_stands(block: CodeBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = regions()
    program = compile(block.code, name_of(block), "exec")

    if block.is_run:
        exec(program, {"__name__": "__main__"})  # noqa: S102 - our own docs

    assert regions() <= before
