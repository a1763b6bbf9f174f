"""The program that the demo starts for its restart: an engine that finds the blocks of an earlier one in the tier.

One JSON document on stdin says what to serve; stdout gets one JSON line per served turn.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import IO, Any

from kvtier.cli.demo.options import SetUp
from kvtier.cli.demo.serving import build_model, config_with, warm_up
from kvtier.cli.demo.signals import ended_like_interrupted
from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import KVTierError

FAILED_STATUS = 2
INTERRUPTED_STATUS = 130


def main() -> int:
    """Serve the requests on stdin and return the exit status."""
    try:
        with ended_like_interrupted():
            document = json.load(sys.stdin)
            serve_requests(SetUp.from_json(document["set_up"]), document["requests"], sys.stdout)
    except KVTierError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    return 0


def serve_requests(
    set_up: SetUp, requests: Iterable[Mapping[str, Any]], output: IO[str]
) -> None:  # Any: JSON
    """Serve every request on a new engine and write a line for each."""
    with KVTierEngine(build_model(set_up.model), config_with(set_up)) as engine:
        warm_up(engine)
        for request in requests:
            result = engine.run(request["prompt"], request["num_answer_tokens"])
            answer = {
                "token_ids": result.tokens,
                "sources": dict(result.sources),
                "first_token_s": result.time_to_first_token_s,
            }
            output.write(json.dumps(answer) + "\n")
            output.flush()


if __name__ == "__main__":
    sys.exit(main())
