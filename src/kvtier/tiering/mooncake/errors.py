"""What the numbers mean that the store's client returns.

Every call answers with integers: 0 or a length when it went well, otherwise one of these. A number that is not
listed is a fault too, with its value in the message.

Source: the names are those of Mooncake Store 0.3.13's ``ErrorCode``.
"""

from enum import IntEnum


class Code(IntEnum):
    """An answer of the store."""

    OK = 0
    INTERNAL_ERROR = -1
    BUFFER_OVERFLOW = -10
    SHARD_INDEX_OUT_OF_RANGE = -100
    SEGMENT_NOT_FOUND = -101
    SEGMENT_ALREADY_EXISTS = -102
    CLIENT_NOT_FOUND = -103
    NO_AVAILABLE_HANDLE = -200
    INVALID_VERSION = -300
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_WRITE = -700
    INVALID_READ = -701
    INVALID_REPLICA = -702
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    OBJECT_HAS_REPLICATION_TASK = -708
    OBJECT_NO_REPLICATION_TASK = -709
    REPLICA_NOT_FOUND = -710
    REPLICA_ALREADY_EXISTS = -711
    REPLICA_IS_GONE = -712
    REPLICA_NOT_IN_LOCAL_MEMORY = -713
    OBJECT_REPLICA_BUSY = -714
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    ETCD_OPERATION_ERROR = -1000
    ETCD_KEY_NOT_EXIST = -1001
    ETCD_TRANSACTION_FAIL = -1002
    ETCD_CTX_CANCELLED = -1003
    OPLOG_ENTRY_NOT_FOUND = -1004
    K8S_LEASE_OPERATION_ERROR = -1005
    K8S_LEASE_NOT_FOUND = -1006
    INCOMPLETE_OPLOG_CATCH_UP = -1007
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    FILE_NOT_FOUND = -1100
    FILE_OPEN_FAIL = -1101
    FILE_READ_FAIL = -1102
    FILE_WRITE_FAIL = -1103
    FILE_INVALID_BUFFER = -1104
    FILE_LOCK_FAIL = -1105
    FILE_INVALID_HANDLE = -1106
    BUCKET_NOT_FOUND = -1200
    BUCKET_ALREADY_EXISTS = -1201
    KEYS_EXCEED_BUCKET_LIMIT = -1202
    KEYS_ULTRA_LIMIT = -1203
    UNABLE_OFFLOAD = -1300
    UNABLE_OFFLOADING = -1301
    TASK_NOT_FOUND = -1400
    TASK_PENDING_LIMIT_EXCEEDED = -1401
    JOB_NOT_FOUND = -1402
    SERIALIZE_UNSUPPORTED = -1500
    SERIALIZE_FAIL = -1501
    DESERIALIZE_FAIL = -1502
    PERSISTENT_FAIL = -1503
    DFS_NETWORK_TIMEOUT = -1600
    DFS_SERVICE_UNAVAILABLE = -1601
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
    return f"{Code(code).name} ({code})" if is_known(code) else f"an unknown answer ({code})"


def is_known(code: int) -> bool:
    """Return whether ``code`` is listed. Pure."""
    return code in _KNOWN


_KNOWN = frozenset(int(code) for code in Code)
