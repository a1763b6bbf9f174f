"""What a server's refusal, or its silence, means to a user and what to do about it.

It decides nothing about blocks. No text of a server or of redis-py goes into a message: both may repeat what they
were sent, and that may be a password. The code of the refusal and a sentence of our own say more.
"""

import os
import socket
import ssl
from collections.abc import Iterator

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.valkey.endpoint import PASSWORD_VARIABLE, Address
from kvtier.tiering.valkey.resp import ClosedError, OverdueError, ProtocolError

try:
    import redis.exceptions
except ImportError as error:
    raise MissingExtraError("redis", "valkey") from error

TIER_TYPE = "valkey"

NEEDED_PERMISSIONS = "+get +set +strlen +pexpire +unlink +cluster|slots +asking ~kvtier:*"
LISTING_PERMISSIONS = "+scan +object|idletime +memory|usage +client|no-touch"

REMEDIES = {
    "NOAUTH": f"it wants a password: give it in url or in {PASSWORD_VARIABLE}",
    "WRONGPASS": f"it does not accept the user or the password of url or {PASSWORD_VARIABLE}",
    "NOPERM": f"the user lacks a permission: grant it {NEEDED_PERMISSIONS}, and to list what is there "
    f"{LISTING_PERMISSIONS}",
    "LOADING": "it is still loading its data and will answer when that is done",
    "READONLY": "it is a replica: name the primary, or set cluster to true if it is one of a cluster",
    "MOVED": "it is one of a cluster: set cluster to true",
    "CLUSTERDOWN": "its cluster has no node for some slots: wait for the failover, or repair the cluster",
    "MISCONF": "it takes no writes because it cannot save them: see its log",
    "MASTERDOWN": "it is a replica without its primary: name the primary",
    "DENIED": "it is in protected mode and answers its own machine only: give it a password",
    "OOM": "its memory is full and its maxmemory-policy evicts nothing: give it more, or an allkeys policy",
}
"""What to do about each refusal of the whole server, by its first word; others are about one block."""

PROTOCOL_ERROR = "ERR Protocol error"
"""What a server says that closes the connection, as it would not know where the next request begins."""

REPEATED_WORDS = (
    f"{PROTOCOL_ERROR}: invalid bulk length",
    f"{PROTOCOL_ERROR}: invalid multibulk length",
    PROTOCOL_ERROR,
)
"""What refusals of a value begin with, and what of them may be repeated: it is no text of ours that came back."""


class HandshakeRefusedError(Exception):
    """A server does not let a new connection in.

    Attributes:
        code: the first word of its refusal.
    """

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


def refused(address: Address, code: str) -> TierError:
    """Return what to raise when the server at ``address`` answers with an error of this code. Pure."""
    remedy = REMEDIES.get(code, "see the server's log")
    return TierError(TIER_TYPE, f"{address} refuses ({_printable(code)}): {remedy}")


def words_of(text: str) -> str:
    """Return what the log may say of a refusal: its code, or as much of its text as holds nothing that was sent. Pure.

    Args:
        text: of the reply.
    """
    known = next((words for words in REPEATED_WORDS if text.startswith(words)), None)
    return known or _printable(text.partition(" ")[0])


def unreachable(address: Address, error: BaseException) -> TierError:
    """Return what to raise when ``error`` came of talking to the server at ``address``. Pure."""
    for cause in _causes(error):
        if isinstance(cause, HandshakeRefusedError):
            return refused(address, cause.code)
        if (reason := _reason(cause)) is not None:
            return TierError(TIER_TYPE, f"{address} cannot be reached: {reason}")
    return TierError(TIER_TYPE, f"{address} cannot be reached ({type(error).__name__}): is it running?")


def _reason(cause: BaseException) -> str | None:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message}): name its authority's in ca_file"
    if isinstance(cause, ssl.SSLError):
        return "TLS fails: does it listen with TLS on this port, and is ca_file right?"
    if isinstance(cause, OverdueError):
        return "it answers too slowly: the time of the job is over"
    # The kernel's own time-outs, which lent sockets have, come as a call that would block.
    if isinstance(cause, TimeoutError | BlockingIOError | redis.exceptions.TimeoutError):
        return "it has not answered within timeout_s"
    if isinstance(cause, ProtocolError) and not isinstance(cause, ClosedError):
        return "what it sends is not the protocol: is it a Valkey or Redis server?"
    if isinstance(cause, socket.gaierror):
        return "its name is not known: check the host in url"
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{os.strerror(cause.errno)}: is it running, and is url right?"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and what it came of, the innermost first: a client wraps what the system said."""
    chain = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    yield from reversed(chain)


def _printable(code: str) -> str:
    return code if code.isascii() and code.isalpha() and len(code) < 32 else "no known code"
