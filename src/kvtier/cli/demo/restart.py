"""Serves turns once more in a new process that shares only the tier's storage with the first one.

The new process is this module as a program, which loads the model itself. One JSON document goes in, one JSON line per
served turn comes out.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from subprocess import Popen
from typing import Any

from kvtier.cli.demo.conversation import ServedTurn, Turn
from kvtier.cli.demo.serving import SetUp, build_model, config_with, serve_turns
from kvtier.cli.processes import ended_like_interrupted, running_module
from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import RestartError


def serve_after_restart(
    set_up: SetUp, turns: Sequence[Turn], on_served: Callable[[ServedTurn], object]
) -> list[ServedTurn]:
    """Serve ``turns`` in a new process and return the results.

    Raises:
        RestartError: the process ended before it had served every turn.
    """
    document = {"set_up": asdict(set_up), "turns": [asdict(turn) for turn in turns]}
    served = []
    with tempfile.TemporaryFile() as messages:
        with running_module(__name__, messages=messages, stop=Popen.terminate) as child:
            assert child.stdin is not None, "the child was started with pipes"
            assert child.stdout is not None, "the child was started with pipes"
            with suppress(BrokenPipeError):  # it has ended: its status says why
                child.stdin.write(json.dumps(document))
                child.stdin.close()
            for line in child.stdout:
                if line.startswith("{"):
                    served.append(_parse(line))
                    on_served(served[-1])
            status = child.wait()
        if status or len(served) != len(turns):
            messages.seek(0)
            lines = messages.read().decode(errors="replace").strip().splitlines() or [""]
            raise RestartError(status, lines[-1])
    return served


def main() -> None:
    """Serve the turns of the document on stdin with a new engine, and print a line for each."""
    with ended_like_interrupted():
        document = json.load(sys.stdin)
        set_up = SetUp(**document["set_up"])
        with KVTierEngine(build_model(set_up.model), config_with(set_up)) as engine:
            serve_turns(engine, [_parse_turn(fields) for fields in document["turns"]], _print)


def _print(served: ServedTurn) -> None:
    sys.stdout.write(json.dumps(asdict(served)) + "\n")
    sys.stdout.flush()


def _parse(line: str) -> ServedTurn:
    fields = json.loads(line)
    prompt, token_ids = tuple(fields["prompt"]), tuple(fields["token_ids"])
    turn = _parse_turn(fields["turn"])
    return ServedTurn(turn, prompt, token_ids, fields["sources"], fields["first_token_s"])


def _parse_turn(fields: dict[str, Any]) -> Turn:  # Any: JSON
    return Turn(fields["conversation"], fields["number"], tuple(fields["token_ids"]))


if __name__ == "__main__":
    main()
