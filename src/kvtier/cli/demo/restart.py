"""Serves turns once more in a new process, which has nothing but the tier's directory in common with this one.

It loads no model itself. The child is this interpreter running ``kvtier.cli.demo.restart``; one JSON document
goes in, one JSON line per served turn comes out. However this block ends, the child has ended before it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvtier.cli.demo.directory import TierDirectory
from kvtier.cli.demo.options import SetUp
from kvtier.cli.demo.report import ServedTurn
from kvtier.cli.demo.serving import build_model, config_with, warm_up
from kvtier.cli.demo.signals import ended_like_interrupted
from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import KVTierError, RestartError

CHILD_MODULE = "kvtier.cli.demo.restart"

SOURCE_FOLDER = Path(__file__).parents[3]
"""Where the child finds this very package, installed or not."""

TERMINATION_S = 15.0
"""What an interrupted child gets to give back its memory, in seconds; it drains its stores for ten at most."""

MAX_MESSAGE_BYTES = 2000
"""How much of what a failed child said is passed on."""


def choose_last_turns(served: Iterable[ServedTurn], num_turns: int) -> list[ServedTurn]:
    """Return the last turn of each of the conversations served last, at most ``num_turns``, in order. Pure."""
    last_turns = {one.turn.conversation: one for one in served}
    return list(last_turns.values())[-num_turns:]


def serve_after_restart(
    set_up: SetUp, directory: TierDirectory, served: Sequence[ServedTurn], note_served: Callable[[], None]
) -> list[ServedTurn]:
    """Serve the prompts of ``served`` again in a new process and return what became of them there.

    Raises:
        RestartError: the process ended without having answered every prompt.
    """
    requests = [{"prompt": one.prompt, "num_answer_tokens": one.turn.num_answer_tokens} for one in served]
    document = json.dumps({"set_up": set_up.to_json(), "requests": requests})
    answers = []
    with tempfile.TemporaryFile() as messages, _child(directory, messages) as child:
        for line in _converse(child, document):
            answers.append(json.loads(line))
            note_served()
        status = child.wait()
        if status or len(answers) != len(served):
            raise RestartError(status, _read_end(messages))
    return [_apply(answer, one) for answer, one in zip(answers, served, strict=True)]


@contextmanager
def _child(directory: TierDirectory, messages: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """Start the child; terminate it if the block is left while it runs."""
    search_path = os.pathsep.join(filter(None, [str(SOURCE_FOLDER), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(  # noqa: S603 - our own interpreter with fixed arguments
        [sys.executable, "-m", CHILD_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        text=True,
        env=os.environ | {"PYTHONPATH": search_path},
        pass_fds=directory.lock_fds,
        # Ctrl-C reaches a whole process group; the child is ended from here, in order.
        start_new_session=True,
    )
    with child:
        try:
            yield child
        finally:
            _end(child)


def _converse(child: subprocess.Popen[str], document: str) -> Iterator[str]:
    assert child.stdin is not None, "the child was started with pipes"
    assert child.stdout is not None, "the child was started with pipes"
    try:
        child.stdin.write(document)
        child.stdin.close()
    except BrokenPipeError:
        return
    yield from (line for line in child.stdout if line.startswith("{"))


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(TERMINATION_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _apply(answer: Mapping[str, Any], served: ServedTurn) -> ServedTurn:  # Any: JSON
    return ServedTurn(
        turn=served.turn,
        prompt=served.prompt,
        token_ids=tuple(answer["token_ids"]),
        sources=dict(answer["sources"]),
        first_token_s=float(answer["first_token_s"]),
    )


def _read_end(messages: IO[bytes]) -> str:
    size_bytes = messages.seek(0, os.SEEK_END)
    messages.seek(max(0, size_bytes - MAX_MESSAGE_BYTES))
    return messages.read().decode(errors="replace").strip()


FAILED_STATUS = 2
INTERRUPTED_STATUS = 130


def main() -> int:
    """Serve what stdin asks for and return the exit status."""
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
