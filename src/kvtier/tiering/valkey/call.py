"""Questions to a server, each with the way its reply is read, and what becomes of them."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from kvtier.errors import TierError
from kvtier.tiering.envelope import Buffer
from kvtier.tiering.valkey.resp import Reply, ReplyReader, encode, read_reply

Outcome: TypeAlias = Reply | TierError
"""A reply, or why there is none. A reply may be an error too: then the server is there and refuses."""


class Call(NamedTuple):
    """One command about one name.

    Attributes:
        name: which decides the node of a cluster.
        request: its bytes, in pieces. They are asked for each time that it is sent, which after a redirection is
            once more: no iterator, therefore.
        read: reads the reply, and puts a value where it belongs.
    """

    name: bytes
    request: Iterable[Buffer]
    read: Callable[[ReplyReader], Reply] = read_reply


def command(verb: bytes, name: bytes, *arguments: bytes) -> Call:
    """Return the call of a command without a value. Pure."""
    return Call(name, (encode(verb, name, *arguments),))


def error_code(outcome: Outcome) -> str:
    """Return the code of the refusal that ``outcome`` is, "" when it is something else. Pure."""
    return outcome.error_code if isinstance(outcome, Reply) else ""
