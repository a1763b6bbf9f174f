"""Where the recorded traces are: beside the source tree, or in it."""

from pathlib import Path

import pytest

from kvtier.sim.formats.registry import read_trace
from kvtier.sim.trace import Trace

ROOT = Path(__file__).parents[2]
TRACE_FOLDERS = (ROOT / "shared" / "traces", ROOT.parent / "shared" / "traces")


def read_recorded(name: str) -> Trace:
    """Return a recorded trace, or skip the test where the recordings are not."""
    for folder in TRACE_FOLDERS:
        path = folder / f"{name}.jsonl.gz"
        if path.exists():
            return read_trace(path)
    pytest.skip(f"the recorded trace {name} is in none of {', '.join(map(str, TRACE_FOLDERS))}")


@pytest.fixture(scope="session")
def conversation() -> Trace:
    """One hour of a chat service."""
    return read_recorded("conversation")


@pytest.fixture(scope="session")
def agentic_dev() -> Trace:
    """Sessions of coding agents."""
    return read_recorded("agentic_dev")
