"""Print which functions of kvtier run for one store and one load, as trees of calls and as numbers.

Four blocks go through the real scheduler half, the tiering manager and the fs tier: they are looked up and missing,
then stored and cascaded, then evicted from host memory and loaded again. Engine and workers are stand-ins. Each frame
that goes makes the path shorter for a reader and the step faster.

    python -m scripts.trace_path              the trees, then the numbers
    python -m scripts.trace_path --summary    the numbers alone
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import FrameType

import numpy as np
from tests.connector.fakes import HASH_TOKENS, FakeBlocks, FakeRequest, FakeSpec, make_first_step

import kvtier
from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_keys
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import StepOutput, WorkerOutput
from kvtier.testing.tier_driver import make_rows
from kvtier.tiering.base import JobMetadata, SecondaryTierManager
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.fs import FSTier
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

NUM_SLOTS = 16
ROW_BYTES = 8192
NUM_BLOCKS = 4
NUM_TOKENS = NUM_BLOCKS * HASH_TOKENS + 1
STEP_S = 0.01
"""Seconds between two steps of a request that waits. Shorter gives the tier's threads less of a busy processor."""

WAIT_S = 60.0
"""Seconds after which a tier that does not end its work is an error."""

SOURCE = str(Path(kvtier.__file__).parent) + "/"
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
"""Lines of the function around them; newer Pythons make most of them no function at all."""

LOOKUP = "TieringOffloadingManager.lookup"


class TracedPath(Enum):
    """What is traced."""

    MISS = "miss"
    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of kvtier.

    Attributes:
        depth: calls of kvtier that it is inside of, in its thread.
        file: relative to the package.
        function: its qualified name.
    """

    depth: int
    file: str
    function: str

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.file}:{self.function}"


@dataclass(slots=True)
class Section:
    """One call into the scheduler half and what threads did because of it.

    Attributes:
        path: what it is a part of.
        title: the call.
        threads: the calls of each thread by its name, in order.
    """

    path: TracedPath
    title: str
    threads: dict[str, list[Call]] = field(default_factory=dict)


class Tracer:
    """Records calls of kvtier's functions. The hook runs in every thread; a thread appends to a list of its own.

    Attributes:
        sections: what was recorded.
    """

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._section: Section | None = None
        self._depths = threading.local()
        self._main = threading.get_ident()

    @contextmanager
    def record(self, path: TracedPath, title: str) -> Iterator[None]:
        """Record the calls of this thread inside the block, and those of other threads until the next block."""
        self._section = Section(path, title)
        self.sections.append(self._section)
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        section, code = self._section, frame.f_code
        if section is None or not code.co_filename.startswith(SOURCE):
            return
        depth = getattr(self._depths, "depth", 0)
        if event == "return":
            self._depths.depth = max(0, depth - 1)
        elif event == "call":
            self._depths.depth = depth + 1
            if not code.co_qualname.endswith(COMPREHENSIONS):
                calls = section.threads.setdefault(threading.current_thread().name, [])
                calls.append(Call(depth, code.co_filename[len(SOURCE) :], code.co_qualname))

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Trace the threads that start inside the block."""
        threading.setprofile(self._hook)
        try:
            yield
        finally:
            threading.setprofile(None)
            self._section = None


class Rows:
    """The rows of a primary tier, in ordinary memory."""

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows."""
        return make_rows(NUM_SLOTS, ROW_BYTES)

    def cleanup(self) -> None:
        """Leave the memory to the collector."""


class Engine:
    """A scheduler half over host memory and an fs tier, called as an engine's scheduler would.

    Args:
        root: folder of the fs tier.
    """

    def __init__(self, root: Path) -> None:
        group = KVGroup(HASH_TOKENS, ("layer",), ROW_BYTES)
        config = OffloadingConfig("engine", ModelIdentity("model"), (group,), HASH_TOKENS)
        primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, Rows())
        settings = {
            "type": "fs",
            "root_dir": str(root),
            "capacity_bytes": "64MiB",
            "direct_io": False,
            "num_threads": 1,
        }
        rows = primary.get_kv_memoryview()
        # A pack with room is there in nearly every store: the first one in a directory makes it, a long way.
        leave_pack(create_secondary_tier(settings, rows, config))
        self.tier = create_secondary_tier(settings, rows, config)
        # Before it has read its directory a lookup waits, another way.
        if not (isinstance(self.tier, FSTier) and self.tier.wait_indexed(WAIT_S)):
            raise RuntimeError(f"the fs tier has not read its directory in {WAIT_S} s")
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.connector = OffloadingConnectorScheduler(FakeSpec(config, self.manager))

    def search(self, request: FakeRequest) -> int:
        """Look a request's blocks up, step after step, until it is known how many tokens are held.

        The manager's ``lookup_deadline_s`` ends it in any case.
        """
        while True:
            num_tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
            if num_tokens is not None:
                return num_tokens
            self.connector.build_connector_meta(StepOutput())
            time.sleep(STEP_S)

    def evict_all(self) -> None:
        """Put every block out of host memory."""
        context, keys = ReqContext("filler"), filler_keys()
        self.manager.prepare_store(keys, context)
        self.manager.complete_store(keys, context, success=False)


def leave_pack(tier: SecondaryTierManager) -> None:
    """Store a block and end the tier, which leaves a pack with room for more."""
    keys, slots = tuple(filler_keys()[:1]), np.zeros(1, np.int64)
    job = JobMetadata(JobId(0), keys, slots, is_promotion=False, req_context=ReqContext("filler"))
    tier.submit_store(job)
    tier.drain(WAIT_S)
    tier.shutdown(WAIT_S)


def filler_keys() -> list[OffloadKey]:
    """Return keys that need every slot. Pure."""
    return make_offload_keys([bytes([number]) * 32 for number in range(NUM_SLOTS)], 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--summary", action="store_true", help="print the numbers alone")
    is_short = parser.parse_args(arguments).summary
    with tempfile.TemporaryDirectory() as folder:
        sections = trace(Path(folder))
    for section in sections if not is_short else ():
        print("\n".join(tree(section)), end="\n\n")
    print("\n".join(summary(sections)))
    return 0


def trace(root: Path) -> list[Section]:
    """Run the miss, the store and the load, and return what ran.

    Args:
        root: an empty folder for the fs tier.
    """
    tracer = Tracer()
    # The tier's threads that read and write start with its first job, inside the block.
    engine = Engine(root / "blocks")
    try:
        with tracer.threads():
            trace_miss_and_store(tracer, engine)
            engine.evict_all()
            trace_load(tracer, engine)
    finally:
        engine.connector.shutdown()
    return tracer.sections


def trace_miss_and_store(tracer: Tracer, engine: Engine) -> None:
    """Look four blocks up that no tier holds, compute them, store them and wait for the cascade."""
    connector, request = engine.connector, FakeRequest("first", list(range(NUM_TOKENS)))
    blocks = (list(range(NUM_BLOCKS + 1)),)
    with tracer.record(TracedPath.MISS, "get_num_new_matched_tokens"):
        connector.get_num_new_matched_tokens(request, 0)
    engine.search(request)
    connector.update_state_after_alloc(request, FakeBlocks(blocks), 0)
    step = make_first_step("first", blocks, NUM_TOKENS)
    with tracer.record(TracedPath.STORE, "build_connector_meta"):
        metadata = connector.build_connector_meta(step)
    report = OffloadingWorkerMetadata()
    for job_id in metadata.store_jobs:
        report.mark_completed(job_id)
    with tracer.record(
        TracedPath.STORE, "update_connector_output: the worker has stored, the blocks cascade"
    ):
        connector.update_connector_output(WorkerOutput(report))
    engine.manager.drain(WAIT_S)
    connector.build_connector_meta(StepOutput())
    connector.request_finished(request)


def trace_load(tracer: Tracer, engine: Engine) -> None:
    """Find the four blocks in the tier, wait for their promotion and begin the load."""
    connector, request = engine.connector, FakeRequest("second", list(range(NUM_TOKENS)))
    with tracer.record(TracedPath.LOAD, "get_num_new_matched_tokens: the tier has the blocks"):
        connector.get_num_new_matched_tokens(request, 0)
    with tracer.record(TracedPath.LOAD, "build_connector_meta: the promotion starts"):
        connector.build_connector_meta(StepOutput())
    engine.tier.drain(WAIT_S)
    with tracer.record(TracedPath.LOAD, "get_num_new_matched_tokens: the blocks have arrived"):
        num_tokens, _ = connector.get_num_new_matched_tokens(request, 0)
    if not num_tokens:
        raise RuntimeError(f"the blocks were not promoted: {num_tokens} tokens found")
    with tracer.record(TracedPath.LOAD, "update_state_after_alloc"):
        connector.update_state_after_alloc(request, FakeBlocks((list(range(NUM_BLOCKS + 1)),)), num_tokens)


def tree(section: Section) -> list[str]:
    """Return a section as indented lines; repeated calls of one function are one line. Pure."""
    lines = [f"##### {section.path.name}: {section.title}"]
    for thread, calls in section.threads.items():
        lines.append(f"-- thread {thread}: {len(calls)} calls")
        for call, repeats in groupby(calls):
            num_repeats = len(list(repeats))
            lines.append(f"{call}   x{num_repeats}" if num_repeats > 1 else str(call))
    return lines


def summary(sections: Sequence[Section]) -> list[str]:
    """Return a line for each path: distinct functions and files, and for a miss the calls of one key. Pure."""
    lines = []
    for path in TracedPath:
        found = [section for section in sections if section.path is path]
        ran = {
            (call.file, call.function) for one in found for calls in one.threads.values() for call in calls
        }
        num_files = len({file for file, _ in ran})
        lines.append(f"{path.name}: {len(ran)} functions, {num_files} files")
        if path is TracedPath.MISS:
            lines.append(
                f"{path.name}: {num_calls_of_a_key(found)} calls for a key, the poll of the step among them"
            )
    return lines


def num_calls_of_a_key(sections: Sequence[Section]) -> int:
    """Return how many calls the last lookup of a section made, itself included; 0 when there was none. Pure."""
    for calls in (calls for section in sections for calls in section.threads.values()):
        starts = [number for number, call in enumerate(calls) if call.function == LOOKUP]
        if starts:
            first = starts[-1]
            rest = calls[first + 1 :]
            inside = next(
                (count for count, call in enumerate(rest) if call.depth <= calls[first].depth), len(rest)
            )
            return 1 + inside
    return 0


if __name__ == "__main__":
    sys.exit(main())
