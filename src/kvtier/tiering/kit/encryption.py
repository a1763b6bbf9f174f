"""Encrypted blocks: AES-256-GCM with keys derived from a key ring, under names that only the ring's owner can make.

A block's key comes from its tenant's entry, the namespace, the tenant's name and 16 random bytes that this process has
drawn for it (HKDF-SHA256); they stand in the header as its salt. Nonces are a counter under that key. So a nonce comes
twice only if two runs draw the same 128 bits: a restart, a fork, another thread's engine or a clock that jumps changes
nothing. Random nonces of 96 bits under one key would end after 2^32 blocks instead.

Names are keyed too (``kit/keyed_names.py``), and a namespace's own name is derived from the ring.

Source: HKDF, RFC 5869; AES-GCM, NIST SP 800-38D.
"""

import itertools
import os
import secrets
import threading
from functools import lru_cache
from typing import ClassVar

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import MissingExtraError, TierError
from kvtier.namespace import Namespace, hide_tenant
from kvtier.tenants import tenant_number
from kvtier.tiering.kit.block_format import BlockFormat, BlockName, EncryptedNamespace, Sealed
from kvtier.tiering.kit.envelope import (
    MAX_COUNTER,
    NAMESPACE_BYTES,
    RAW_CODEC,
    SALT_BYTES,
    Buffer,
    EncryptedFields,
    Envelope,
    HeaderCheck,
    additional_data,
    join_encrypted_header,
    unpack,
)
from kvtier.tiering.kit.key_ring import KeyEntry, KeyRing
from kvtier.tiering.kit.keyed_names import BlockNames, derive_key
from kvtier.tiering.kit.living_ring import LivingRing

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher, algorithms, modes
except ImportError as error:
    raise MissingExtraError("cryptography", "encryption") from error

NONCE_BYTES = 12

MAX_READ_KEYS = 1024
"""Data keys kept for reading, one for each run of a process that wrote; others are derived again, 10 us each."""

CHECKED_PIECE_BYTES = 1 << 20
"""Bytes decrypted at a time where a block is only checked. More takes memory, less makes more calls."""

NAMESPACE_PURPOSE = b"kvtier namespace 3"
BLOCK_PURPOSE = b"kvtier block 3"


class _Forks:
    """How often this process is a fork's child; a counter that a child shares with its parent is not used again."""

    number = 0

    @classmethod
    def note(cls) -> None:
        """Count one."""
        cls.number += 1


os.register_at_fork(after_in_child=_Forks.note)


class WriteKey:
    """A data key that this process alone writes with, and its counter.

    Args:
        entry: of the ring.
        namespace: 16 bytes.
    """

    def __init__(self, entry: KeyEntry, namespace: bytes) -> None:
        self.salt = secrets.token_bytes(SALT_BYTES)
        self.data_key = derive_block_key(entry, namespace, self.salt)
        self._counter = itertools.count()  # one call of the interpreter: two threads never get one number
        self._fork = _Forks.number

    def draw_counter(self) -> int | None:
        """Return a number that no other block under this key has; None: the key is used up, or of another process."""
        counter = next(self._counter)
        return counter if counter <= MAX_COUNTER and self._fork == _Forks.number else None


def derive_block_key(entry: KeyEntry, namespace: bytes, salt: bytes) -> bytes:
    """Return the data key of the blocks that one run of a process writes for a tenant in a namespace. Pure."""
    tenant = b"" if entry.tenant is None else b"\1" + entry.tenant.encode()
    return derive_key(entry.secret, salt, BLOCK_PURPOSE + namespace + tenant)


def nonce_of(counter: int) -> bytes:
    """Return the nonce of the block of that number under its data key. Pure."""
    return counter.to_bytes(NONCE_BYTES, "little")


class EncryptedFormat(BlockFormat):
    """The blocks of one namespace, encrypted.

    Mutable is one reference: what was derived from the ring as it is. ``_lock`` guards its replacement, which drops
    everything that was derived from the ring of before.

    Args:
        living: the ring.
        tenant: whose key encrypts blocks without a tenant; None: the default entry.
        plain_digest: of the namespace without encryption.
        tenant_salt: the engine's, with which the numbers of its tenants are made.
    """

    is_encrypted: ClassVar[bool] = True

    def __init__(
        self, living: LivingRing, tenant: str | None, plain_digest: bytes, tenant_salt: str = ""
    ) -> None:
        self._living = living
        self._tenant = tenant
        self._tenant_salt = tenant_salt
        self.digest = derive_key(living.ring.names_secret, None, NAMESPACE_PURPOSE + plain_digest)
        self._namespace = self.digest[:NAMESPACE_BYTES]
        names = BlockNames(living.ring.names_secret, self._namespace)
        self.name = names.name
        self._names = names
        self._lock = threading.Lock()
        self._keys = self._derive_keys()

    def key(self, name: BlockName) -> OffloadKey:
        return self._names.key(name)

    def serves(self, key: OffloadKey) -> bool:
        return self._keys.current(get_offload_tenant(key)) is not None

    def refresh(self) -> None:
        self._living.refresh()
        if self._keys.ring is self._living.ring:
            return
        with self._lock:
            if self._keys.ring is not self._living.ring:
                self._keys = self._derive_keys()

    def seal(
        self,
        key: OffloadKey,
        row: memoryview,
        scratch: memoryview | None,
        *,
        generation: int = 0,
    ) -> Sealed:
        entry, write_key, counter = self._keys.draw(get_offload_tenant(key))
        num_bytes = len(row)
        payload = memoryview(bytearray(num_bytes)) if scratch is None else scratch[:num_bytes]
        before, behind = EncryptedFields(
            namespace=self._namespace,
            name=self.name(key),
            stored_bytes=num_bytes,
            raw_bytes=num_bytes,
            key_id=entry.number,
            salt=write_key.salt,
            counter=counter,
            generation=generation,
        ).pack()
        cipher = Cipher(algorithms.AES(write_key.data_key), modes.GCM(nonce_of(counter))).encryptor()
        cipher.authenticate_additional_data(before + behind)
        cipher.update_into(row, payload)
        cipher.finalize()
        return Sealed(join_encrypted_header(before, cipher.tag, behind), payload)

    def open(self, header: Buffer, payload: Buffer, key: OffloadKey, row: memoryview) -> HeaderCheck:
        envelope = unpack(header)
        if isinstance(envelope, HeaderCheck):
            return envelope
        if not envelope.is_encrypted:
            return HeaderCheck.NOT_ENCRYPTED
        if envelope.namespace != self._namespace or envelope.key != self.name(key):
            return HeaderCheck.OTHER_KEY
        if envelope.codec != RAW_CODEC:
            return HeaderCheck.OTHER_CODEC
        if not envelope.stored_bytes == len(payload) == len(row):
            return HeaderCheck.DAMAGED
        keys = self._keys
        current = keys.current(get_offload_tenant(key))
        if current is None:
            return HeaderCheck.UNKNOWN_KEY_ID
        data_key = keys.read_key(envelope, current.tenant)
        if isinstance(data_key, HeaderCheck):
            return data_key
        return decrypt(header, envelope, payload, data_key, row)

    def _derive_keys(self) -> "RingKeys":
        return RingKeys(self._living.ring, self._tenant, self._namespace, self._tenant_salt)


def decrypt(
    header: Buffer, envelope: Envelope, payload: Buffer, data_key: bytes, row: memoryview
) -> HeaderCheck:
    """Decrypt a payload into ``row``, which may be the same memory; zero it if the tag is wrong."""
    cipher = _begin_decryption(header, envelope, data_key)
    cipher.update_into(payload, row)
    try:
        cipher.finalize_with_tag(envelope.checksum)
    except InvalidTag:
        row[:] = bytes(len(row))
        return HeaderCheck.DAMAGED
    return HeaderCheck.OK


def _check_tag(header: Buffer, envelope: Envelope, payload: memoryview, data_key: bytes) -> HeaderCheck:
    """Check a payload as ``decrypt``, by pieces, and keep nothing of what it says."""
    cipher = _begin_decryption(header, envelope, data_key)
    piece = memoryview(bytearray(min(len(payload), CHECKED_PIECE_BYTES)))
    for begin in range(0, len(payload), CHECKED_PIECE_BYTES):
        part = payload[begin : begin + CHECKED_PIECE_BYTES]
        cipher.update_into(part, piece[: len(part)])
    try:
        cipher.finalize_with_tag(envelope.checksum)
    except InvalidTag:
        return HeaderCheck.DAMAGED
    return HeaderCheck.OK


def _begin_decryption(header: Buffer, envelope: Envelope, data_key: bytes) -> AEADDecryptionContext:
    nonce = nonce_of(int.from_bytes(envelope.nonce[SALT_BYTES:], "little"))
    cipher = Cipher(algorithms.AES(data_key), modes.GCM(nonce)).decryptor()
    cipher.authenticate_additional_data(additional_data(header))
    return cipher


class RingKeys:
    """What was derived from one ring in one namespace, dropped as a whole when the ring changes.

    Mutable are three tables of derived keys. Single operations of a dictionary are atomic, and two threads that derive
    a key for reading at the same time get the same one; ``_lock`` guards the making of a key for writing.

    Args:
        ring: the ring.
        tenant: whose key encrypts blocks without a tenant; None: the default entry.
        namespace: 16 bytes.
        tenant_salt: the engine's.

    Attributes:
        ring: as given.
    """

    def __init__(self, ring: KeyRing, tenant: str | None, namespace: bytes, tenant_salt: str) -> None:
        self.ring = ring
        self._tenant = tenant
        self._namespace = namespace
        self._lock = threading.Lock()
        self._tenants = {tenant_number(name, tenant_salt): name for name in ring.tenants()}
        self._dropped = {tenant_number(name, tenant_salt) for name in ring.dropped}
        self._current: dict[int, KeyEntry | None] = {}
        self._write_keys: dict[int, WriteKey] = {}
        self._read_keys: dict[tuple[int, bytes], bytes] = {}

    def current(self, number: int) -> KeyEntry | None:
        """Return the entry that encrypts blocks of the tenant of that number; 0 stands for none."""
        try:
            return self._current[number]
        except KeyError:
            if len(self._current) >= MAX_READ_KEYS:
                self._current.clear()
            entry = self._current[number] = self._find(number)
            return entry

    def draw(self, number: int) -> tuple[KeyEntry, WriteKey, int]:
        """Return what encrypts the next block of a tenant: the entry, the key and a counter of one use.

        Raises:
            TierError: it has no entry.
        """
        entry = self.current(number)
        if entry is None:
            raise TierError("encryption", "the key of a block's tenant was dropped meanwhile")
        while True:
            write_key = self._write_keys.get(entry.number)
            counter = None if write_key is None else write_key.draw_counter()
            if write_key is not None and counter is not None:
                return entry, write_key, counter
            fresh = WriteKey(entry, self._namespace)
            with self._lock:
                if self._write_keys.get(entry.number) is write_key:
                    self._write_keys[entry.number] = fresh

    def read_key(self, envelope: Envelope, tenant: str | None) -> bytes | HeaderCheck:
        """Return the key of a block that must be of ``tenant``, or why it cannot be read."""
        entry = self.ring.entry(envelope.key_id)
        if entry is None:
            was_dropped = envelope.key_id < self.ring.next_number
            return HeaderCheck.DROPPED_KEY_ID if was_dropped else HeaderCheck.UNKNOWN_KEY_ID
        if entry.tenant != tenant:
            # Of another tenant, or of before this one had a key of its own: never read, and in the way of a new one.
            return HeaderCheck.DROPPED_KEY_ID
        salt = envelope.nonce[:SALT_BYTES]
        data_key = self._read_keys.get((entry.number, salt))
        if data_key is None:
            if len(self._read_keys) >= MAX_READ_KEYS:
                self._read_keys.clear()
            data_key = derive_block_key(entry, self._namespace, salt)
            self._read_keys[entry.number, salt] = data_key
        return data_key

    def _find(self, number: int) -> KeyEntry | None:
        if number == 0:
            return self.ring.current(self._tenant)
        name = self._tenants.get(number)
        if name is None and number in self._dropped:
            return None
        return self.ring.current(name)


def encrypt_namespace(
    identity: Namespace, living: LivingRing, tenant: str | None, tenant_salt: str = ""
) -> EncryptedNamespace:
    """Return the namespace in which an engine's blocks are encrypted.

    Its name follows from the plain one and the ring, so that it confirms no guess of a tenant's salt, and plain blocks
    and those of another ring are in another namespace. Its document has no digest of a salt.

    Args:
        identity: the namespace without encryption.
        living: the ring.
        tenant: whose key encrypts blocks without a tenant; None: the default entry.
        tenant_salt: the engine's, with which the numbers of its tenants are made.
    """
    block_format = EncryptedFormat(living, tenant, identity.digest, tenant_salt)
    return EncryptedNamespace(hide_tenant(identity.document), block_format.digest, block_format)


class BlockOpener:
    """Tries the keys of a ring on blocks of any namespace, for commands that need no engine.

    Args:
        ring: the ring.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring
        self._names = lru_cache(64)(self._names_of)
        self._tenants = {0, *map(tenant_number, ring.tenants())}

    def tenant_number(self, envelope: Envelope) -> int:
        """Return the number of the tenant of a block, from its keyed name."""
        return get_offload_tenant(self.key_of(envelope.namespace, envelope.key))

    def key_of(self, namespace: bytes, name: bytes) -> OffloadKey:
        """Return the block that an encrypted namespace calls so, random bytes where it is of another ring."""
        return self._names(namespace).key(name)

    def is_of_ring(self, namespace: bytes, name: bytes) -> bool:
        """Return whether a name stands for a block of none, or of a tenant of the ring in an engine without a salt.

        Random bytes seldom do. Whether they are the number of a tenant under a salt, only that salt tells.
        """
        return get_offload_tenant(self.key_of(namespace, name)) in self._tenants

    def open(self, header: Buffer, payload: Buffer) -> HeaderCheck:
        """Check a block of any tenant with the key that its header names."""
        envelope = unpack(header)
        if isinstance(envelope, HeaderCheck):
            return envelope
        entry = self._ring.entry(envelope.key_id)
        if entry is None:
            return HeaderCheck.UNKNOWN_KEY_ID
        if envelope.stored_bytes != len(payload):
            return HeaderCheck.DAMAGED
        return self._decrypt(header, envelope, payload, entry)

    def opens_with_any(self, header: Buffer, payload: Buffer) -> bool:
        """Return whether any entry of the ring opens a block, also one that its header does not name."""
        envelope = unpack(header)
        if isinstance(envelope, HeaderCheck) or not envelope.is_encrypted:
            return False
        return any(
            self._decrypt(header, envelope, payload, entry) is HeaderCheck.OK for entry in self._ring.entries
        )

    def _decrypt(self, header: Buffer, envelope: Envelope, payload: Buffer, entry: KeyEntry) -> HeaderCheck:
        data_key = derive_block_key(entry, envelope.namespace, envelope.nonce[:SALT_BYTES])
        return _check_tag(header, envelope, memoryview(payload), data_key)

    def _names_of(self, namespace: bytes) -> BlockNames:
        return BlockNames(self._ring.names_secret, namespace)
