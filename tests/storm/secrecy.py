"""Encryption in a storm: a key ring whose entries come and go, and what must never be seen where blocks are written.

The ring is a file, as in use. Its secrets, salts of data keys and counters come from a source of chance of the storm's
own, so that names, and with them the order of files, are the same again. Whatever a place that encrypts is given to
write passes ``PlainBytes``: no page of a block may be in it, and no nonce may come twice with other bytes.
"""

import hashlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.checked_engine.memory import PAGE_BYTES

from kvtier.tiering.fs import directory, pack, purge_requests, tier
from kvtier.tiering.kit import encryption, key_ring
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, MAGIC, HeaderCheck, join_encrypted_header, unpack
from kvtier.tiering.kit.key_ring import add_entry, drop_tenant, make_ring, read_ring, write_ring

RAM_DISK = Path("/dev/shm")  # noqa: S108  # only for speed; a folder of our own is made in it

RING_TENANTS = ("alice", "bob")
"""Tenants with keys of their own, now and then."""

NAMED = slice(7, 64)
TAG = slice(74, 90)
"""Where an encrypted header has the length of its name, the namespace and the name; and the tag."""


class PlainBytes:
    """Watches what is written to places whose tiers encrypt.

    Attributes:
        pages: what device blocks of this episode have held.
        broken_laws: what was seen and must not be.
    """

    def __init__(self) -> None:
        self.pages: set[bytes] = set()
        self.broken_laws: list[str] = []
        self._uses: dict[tuple[int, bytes], bytes] = {}

    def watch(self, data: bytes | bytearray) -> None:
        """Look through what a tier that encrypts is about to write; its parts begin at multiples of a page."""
        for begin in range(0, len(data), PAGE_BYTES):
            page = bytes(data[begin : begin + PAGE_BYTES])
            if page in self.pages:
                self.broken_laws.append("an encrypted tier has written a plain page of a block")
            elif page[:4] == MAGIC:
                self._watch_header(data, begin)

    def _watch_header(self, data: bytes | bytearray, begin: int) -> None:
        envelope = unpack(data[begin : begin + ENVELOPE_BYTES])
        if isinstance(envelope, HeaderCheck) or not envelope.is_encrypted:
            self.broken_laws.append("an encrypted tier has written the header of a plain block")
            return
        block = bytes(data[begin : begin + ENVELOPE_BYTES])
        use = hashlib.blake2b(block, digest_size=16).digest()
        if self._uses.setdefault((envelope.key_id, envelope.nonce), use) != use:
            self.broken_laws.append("a nonce has come twice under one key")


class StormRing:
    """The key ring of an engine, which outlives it.

    Args:
        wall_clock: seconds since 1970.

    Attributes:
        path: its file.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        parent = RAM_DISK if RAM_DISK.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-storm-ring-", dir=parent)
        self._wall_clock = wall_clock
        self.path = Path(self._folder.name) / "ring"
        write_ring(self.path, add_entry(make_ring(), None, wall_clock()), is_new=True)

    def dropped_tenants(self) -> set[str]:
        """Return the tenants whose keys were dropped and that have no newer one."""
        ring = read_ring(self.path)
        return set(ring.dropped) - set(ring.tenants())

    def change(self, rng: random.Random) -> str:
        """Rotate the default's key or a tenant's, or drop a tenant's; return which of these."""
        ring, tenant = read_ring(self.path), rng.choice([None, *RING_TENANTS])
        if tenant in ring.tenants() and rng.random() < 0.5:
            assert tenant is not None, "only tenants are listed"
            write_ring(self.path, drop_tenant(ring, tenant))
            return "key dropped"
        write_ring(self.path, add_entry(ring, tenant, self._wall_clock()))
        return "key rotated"

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


def forge(target: bytes, source: bytes) -> bytes:
    """Return the block ``source`` under the name of ``target`` where both are encrypted, else as it is. Pure.

    All that needs no key is right: the header's own checksum too.
    """
    if not (is_encrypted(target) and is_encrypted(source)):
        return source
    header = bytearray(source[: ENVELOPE_BYTES - 8])
    header[NAMED] = target[NAMED]
    fields = bytes(header[: TAG.start]), bytes(header[TAG]), bytes(header[TAG.stop :])
    return join_encrypted_header(*fields) + source[ENVELOPE_BYTES:]


def is_encrypted(block: bytes) -> bool:
    """Return whether a block with this header is encrypted. Pure."""
    envelope = unpack(block[:ENVELOPE_BYTES]) if len(block) >= ENVELOPE_BYTES else HeaderCheck.DAMAGED
    return not isinstance(envelope, HeaderCheck) and envelope.is_encrypted


class _Secrets:
    """What production code gets for the module ``secrets``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def token_bytes(self, num_bytes: int) -> bytes:
        """Return bytes that come again with the seed."""
        return self._rng.randbytes(num_bytes)

    def token_hex(self, num_bytes: int) -> str:
        """Return the same in hex."""
        return self.token_bytes(num_bytes).hex()


def secret_calls(seed: int) -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that a seed draws the same secrets again."""
    secrets = _Secrets(random.Random(f"{seed} secrets"))  # to be repeated, not to be secret
    modules = (encryption, key_ring, directory, pack, purge_requests, tier)
    return [(module, "secrets", secrets) for module in modules]
