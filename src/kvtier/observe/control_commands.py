"""Commands to a living engine. Each is made on the server's thread and advanced at the end of the engine's steps.

``advance`` returns None while the command needs further steps. It never blocks: what takes long is begun there, and
looked at again in the next step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvtier.connector.protocols import ControlledHalf
from kvtier.errors import ControlError, UnknownNameError, shorten
from kvtier.observe.control_wire import Message


class Command(ABC):
    """Something that an operator wants done. Its methods but the constructor are for the scheduler's thread."""

    @abstractmethod
    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        """Go on; return the reply when the command has ended.

        Raises:
            ControlError: it cannot be done; the message is the reply.
        """

    def abandon(self, half: ControlledHalf) -> None:
        """Undo what was begun and has not ended; its client is gone."""
        del half

    def describe_progress(self) -> str:
        """Return how far it is, as the end of a sentence. Called on the server's thread."""
        return "it goes no further"


class Drain(Command):
    """Waits until stores have ended and the tiers have got what is pending for them."""

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        if half.has_open_stores():
            return None
        drain = getattr(half.manager, "drain", None)
        # With no time to wait it only submits what is pending and says whether anything is left.
        return {"ok": True} if drain is None or drain(0.0) else None

    def describe_progress(self) -> str:
        return "blocks are still being written"


def make_command(
    name: object, request: Message, hash_prompt: Callable[[Sequence[int]], Sequence[bytes]] | None
) -> Command:
    """Return the command that a request names, with its arguments checked.

    Args:
        name: the command.
        request: the request, with its arguments.
        hash_prompt: makes content hashes of token ids; None where the engine does not offer it.

    Raises:
        UnknownNameError: there is no such command.
        ControlError: an argument is wrong.
    """
    del request, hash_prompt
    if not isinstance(name, str):
        raise ControlError(f"do={shorten(name)}: must be the name of a command")
    if name == "drain":
        return Drain()
    raise UnknownNameError("command", name, ["hello", "stats", "recent", "drain"])
