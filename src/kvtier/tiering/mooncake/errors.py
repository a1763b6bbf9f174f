"""What those of the numbers mean that the store's client returns and that change what is done.

Every call answers with integers: 0 or a length when it went well, otherwise a negative number. One that is not listed
here is a fault, with its value in the message.

Source: the names are those of Mooncake Store 0.3.13's ``ErrorCode``.
"""

from enum import IntEnum


class Code(IntEnum):
    """An answer of the store."""

    OK = 0
    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    REPLICA_NOT_FOUND = -710
    REPLICA_IS_GONE = -712
    TRANSFER_FAIL = -800
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    KEYS_EXCEED_BUCKET_LIMIT = -1202
    KEYS_ULTRA_LIMIT = -1203
    DFS_QUOTA_EXCEEDED = -1602
    TENANT_QUOTA_EXCEEDED = -1700


MASTER_AWAY = frozenset(
    {
        Code.RPC_FAIL,
        Code.RPC_TIMEOUT,
        Code.UNAVAILABLE_IN_CURRENT_STATUS,
        Code.UNAVAILABLE_IN_CURRENT_MODE,
    }
)
"""The master was not reached, or does not serve: nothing is known of any key."""

NO_ROOM = frozenset(
    {
        Code.NO_AVAILABLE_HANDLE,
        Code.KEYS_EXCEED_BUCKET_LIMIT,
        Code.KEYS_ULTRA_LIMIT,
        Code.DFS_QUOTA_EXCEEDED,
        Code.TENANT_QUOTA_EXCEEDED,
    }
)
"""The store is well and full."""

ABSENT = frozenset(
    {
        Code.OBJECT_NOT_FOUND,
        Code.REPLICA_IS_NOT_READY,
        Code.REPLICA_NOT_FOUND,
        Code.REPLICA_IS_GONE,
    }
)
"""There is no whole value: never written, evicted, or still being written."""

HELD = frozenset({Code.OK, Code.OBJECT_ALREADY_EXISTS})
"""The store has a value under the name, ours or an older one."""


def name_of(code: int) -> str:
    """Return what ``code`` is called, with its number. Pure."""
    return f"{_NAMES[code]} ({code})" if code in _NAMES else f"error {code}"


_NAMES = {int(code): code.name for code in Code}
