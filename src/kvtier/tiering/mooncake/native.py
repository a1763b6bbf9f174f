"""The client library: how it is loaded, what of it is used, and what it reads from the environment.

It decides nothing. The library takes its time-outs and its verbosity from environment variables only; they hold
for the whole process, and whatever the operator has set stays.

Workaround (2026-11, mooncake-transfer-engine-non-cuda 0.3.13.post1): ``setup`` and ``close`` hold the interpreter's
lock while they talk to the master, so a hung one would stop every thread of the engine. ``knock`` finds out first
whether anything answers at all; ``test_a_hung_master_is_found_out_before_the_library_is_asked`` fails without it.
"""

import math
import os
import socket
from typing import Protocol

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.mooncake.errors import Code, name_of
from kvtier.tiering.mooncake.settings import MooncakeSettings

try:
    # Read while the library is loaded; without it each call writes several lines to standard error.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # Fails too without a shared library that the wheel does not bring; the error names their packages.
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ImportError as error:
    raise MissingExtraError("mooncake", "mooncake") from error

TIER_TYPE = "mooncake"

HANDSHAKE = "P2PHANDSHAKE"
"""Processes find each other through the master; no further metadata server is needed."""

SETUP_ATTEMPTS = 2
"""How often the client looks for a free port. Each attempt talks to the master with the interpreter's lock held."""

KNOCK = bytes(64)
"""Not a request: a living master answers it by hanging up, a hung one not at all."""


class ReplicaOptions(Protocol):
    """How many copies of a value are made."""

    replica_num: int


class NativeStore(Protocol):
    """What is used of the library's client, by position; ``errors`` explains each answer."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        segment_bytes: int,
        local_buffer_bytes: int,
        protocol: str,
        rdma_devices: str,
        master: str,
        /,
    ) -> int:
        """Join the store. Thread: any; blocks, with the interpreter's lock held."""

    def register_buffer(self, address: int, num_bytes: int, /) -> int:
        """Let transfers come from and go to this memory."""

    def unregister_buffer(self, address: int, /) -> int:
        """End that, before the memory is given back."""

    def batch_put_from_multi_buffers(
        self,
        names: list[str],
        addresses: list[list[int]],
        lengths: list[list[int]],
        config: ReplicaOptions,
        /,
    ) -> list[int]:
        """Write values, each gathered from several places; one that is there stays as it is."""

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], lengths: list[list[int]], /
    ) -> list[int]:
        """Read values, each scattered to several places."""

    def get_into_ranges(
        self,
        addresses: list[int],
        names: list[list[str]],
        offsets: list[list[list[int]]],
        starts: list[list[list[int]]],
        lengths: list[list[list[int]]],
        /,
    ) -> list[list[list[int]]]:
        """Read parts of values: for each buffer, for each name, offsets in the buffer, starts in the value, lengths."""

    def batch_is_exist(self, names: list[str], /) -> list[int]:
        """Return 1 for each value that is whole."""

    def batch_remove(self, names: list[str], /) -> list[int]:
        """Remove values that are not leased."""

    def remove_by_regex(self, pattern: str, /) -> int:
        """Remove values that are not leased and whose names fit; return how many."""

    def get_size(self, name: str, /) -> int:
        """Return the length of a value."""

    def close(self) -> int:
        """Leave the store. Thread: any; blocks, with the interpreter's lock held."""


def open_native(settings: MooncakeSettings) -> NativeStore:
    """Return a client that has joined the store; may block, with the interpreter's lock held.

    Raises:
        TierError: the master does not answer, or refuses.
    """
    prepare_environment(settings)
    knock(settings.master, settings.timeout_s)
    native: NativeStore = MooncakeDistributedStore()
    # No local buffer: each transfer is from or into memory that we register.
    code = native.setup(
        settings.local_host,
        HANDSHAKE,
        settings.segment_bytes,
        0,
        settings.protocol.value,
        "",
        settings.master,
    )
    if code != Code.OK:
        native.close()
        remedy = (
            "see the library's own lines on standard error; are local_host, protocol and segment_bytes right?"
        )
        raise TierError(
            TIER_TYPE, f"joining the store at {settings.master} failed: {name_of(code)}; {remedy}"
        )
    return native


def make_replica_options(num_replicas: int) -> ReplicaOptions:
    """Return the library's way to ask for so many copies."""
    options: ReplicaOptions = ReplicateConfig()
    options.replica_num = num_replicas
    return options


def knock(master: str, timeout_s: float) -> None:
    """Check that the master answers at its address.

    Raises:
        TierError: it does not, or not in time.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.sendall(KNOCK)
            connection.recv(1)
    except ConnectionResetError:
        return  # the other way to hang up
    except OSError as error:
        remedy = "is mooncake_master running there, and is its port open to this machine?"
        raise TierError(TIER_TYPE, f"the master at {master} does not answer ({error}): {remedy}") from error


def prepare_environment(settings: MooncakeSettings) -> None:
    """Set what the library reads from the environment and is not set yet.

    Effects: ``os.environ``, for the life of the process; a second tier finds what the first has set.
    """
    timeout_ms = str(math.ceil(settings.timeout_s * 1000))
    timeout_s = str(math.ceil(settings.timeout_s))
    variables = {
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_STORE_CLIENT_SETUP_RETRIES": str(SETUP_ATTEMPTS),
        "MC_TCP_BIND_ADDRESS": settings.local_host,
        "MC_RPC_TIMEOUT_MS": timeout_ms,
        "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": timeout_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": timeout_s,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
