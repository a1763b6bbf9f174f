"""Which node of a cluster has which hash slot, as redis-py reads it from the first node that answers.

It keeps no connection and no state: the map is a value, read anew when it has turned out to be wrong.
"""

from collections.abc import Iterable
from typing import TypeAlias

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.link import connection_arguments, tls_arguments
from kvtier.tiering.valkey.refusals import unreachable
from kvtier.tiering.valkey.settings import ValkeySettings

try:
    from redis.cluster import ClusterNode, RedisCluster
    from redis.crc import key_slot
    from redis.exceptions import ClusterDownError, RedisClusterException, RedisError
except ImportError as error:
    raise MissingExtraError("redis", "valkey") from error

SlotMap: TypeAlias = dict[int, Address]
"""The primary of each hash slot; a slot that nobody serves is not in it."""


def slot_of(name: bytes) -> int:
    """Return the hash slot of a name: of what stands in its braces. Pure."""
    return int(key_slot(name))


def fetch_slot_map(settings: ValkeySettings, addresses: Iterable[Address]) -> SlotMap:
    """Ask the nodes at ``addresses`` one after another until one says who has which slots.

    Raises:
        TierError: none of them did.

    Thread: any; blocks, for the time-outs of each node that does not answer.
    """
    error: TierError | None = None
    for address in addresses:
        try:
            return _fetch_from(settings, address)
        except (RedisError, RedisClusterException, OSError) as cause:
            error = unreachable(address, cause)
            error.__cause__ = cause
    assert error is not None, "the address that the user gave is one of them"
    raise error


def _fetch_from(settings: ValkeySettings, address: Address) -> SlotMap:
    # One node at a time: redis-py would ask them in an order of its own, the one that hangs first.
    node = ClusterNode(address.host, address.port)  # type: ignore[no-untyped-call]  # redis-py 8.1 has none there
    is_tls = settings.endpoint.is_tls
    arguments = connection_arguments(settings) | ({"ssl": True, **tls_arguments(settings)} if is_tls else {})
    del arguments["db"]
    try:
        cluster = RedisCluster(startup_nodes=[node], require_full_coverage=False, **arguments)
    except IndexError as error:  # 2026-11, redis-py 8.1: takes the first primary of a cluster without slots
        raise ClusterDownError("CLUSTERDOWN no slots") from error
    slots = cluster.nodes_manager.slots_cache
    slot_map = {slot: Address(str(owners[0].host), int(owners[0].port)) for slot, owners in slots.items()}
    cluster.close()
    return slot_map
