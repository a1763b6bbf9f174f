"""Serves turns once more in a new process that shares only the tier's storage with this one.

The child is this interpreter running ``kvtier.cli.demo.restarted``, which loads the model itself. One JSON document
goes in, one JSON line per served turn comes out. The child has always ended when ``serve_after_restart`` returns or
raises.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from kvtier.cli.demo.backends import make_child_environment
from kvtier.cli.demo.directory import TierDirectory
from kvtier.cli.demo.options import SetUp
from kvtier.cli.demo.report import ServedTurn
from kvtier.errors import RestartError

CHILD_MODULE = "kvtier.cli.demo.restarted"

TERMINATION_S = 15.0
"""Seconds for an interrupted child to free its memory; it drains its stores for at most ten."""

MAX_MESSAGE_BYTES = 2000
"""Bytes of a failed child's error output that are passed on."""


def choose_last_turns(served: Iterable[ServedTurn], num_turns: int) -> list[ServedTurn]:
    """Return the last turn of each conversation, at most the ``num_turns`` last ones, in order. Pure."""
    last_turns = {one.turn.conversation: one for one in served}
    return list(last_turns.values())[-num_turns:]


def serve_after_restart(
    set_up: SetUp, directory: TierDirectory, served: Sequence[ServedTurn], on_served: Callable[[], None]
) -> list[ServedTurn]:
    """Serve the prompts of ``served`` again in a new process and return the results.

    Raises:
        RestartError: the process ended before it had answered every prompt.
    """
    requests = [{"prompt": one.prompt, "num_answer_tokens": one.turn.num_answer_tokens} for one in served]
    document = json.dumps({"set_up": set_up.to_json(), "requests": requests})
    answers = []
    with tempfile.TemporaryFile() as messages, _child(directory, messages) as child:
        for line in _converse(child, document):
            answers.append(json.loads(line))
            on_served()
        status = child.wait()
        if status or len(answers) != len(served):
            raise RestartError(status, _read_end(messages))
    return [_apply(answer, one) for answer, one in zip(answers, served, strict=True)]


@contextmanager
def _child(directory: TierDirectory, messages: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """Start the child; terminate it if the block ends while it runs."""
    child = subprocess.Popen(  # noqa: S603 - our own interpreter with fixed arguments
        [sys.executable, "-m", CHILD_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        text=True,
        env=make_child_environment(),
        pass_fds=directory.lock_fds,
        # Ctrl-C reaches a whole process group; this process ends the child itself, in order.
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
