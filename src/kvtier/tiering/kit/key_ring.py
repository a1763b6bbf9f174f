"""The key ring: the file with the secrets of encrypted tiers, and what may be changed in it.

It is one JSON object in a file of mode 0600 that belongs to the user: the secret that names are made with, and entries
of a number, a time, 32 random bytes and the tenant that they are for, or none. The newest entry of a tenant encrypts,
the older ones still read. A number is never given again, so a number that is missing was dropped. The file is replaced
whole, so that no reader sees half of it.
"""

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from kvtier.errors import ConfigError

FORMAT_VERSION = 1
SECRET_BYTES = 32
FILE_MODE = 0o600
MAX_FILE_BYTES = 2**24
"""About a hundred thousand entries."""

MAX_NUMBER = 2**32 - 1
MAX_TENANT_CHARS = 200

_FIELDS = frozenset({"kvtier_keys", "names", "next_number", "entries", "dropped"})
_ENTRY_FIELDS = frozenset({"number", "created_s", "secret", "tenant"})


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key.

    Attributes:
        number: of the entry, as headers have it; at least 1.
        created_s: when it was made, seconds since 1970.
        secret: 32 bytes that block keys are derived from.
        tenant: whose blocks it is for; None for the default: those without a tenant or with one that has no entry.
    """

    number: int
    created_s: int
    secret: bytes = field(repr=False)
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Every key.

    Attributes:
        names_secret: 32 bytes that names of blocks and namespaces are derived from; it stays as long as the ring.
        entries: by number, ascending.
        next_number: of the entry that is made next; every lower one that is missing was dropped.
        dropped: numbers of dropped entries by tenant. Blocks of one without a newer entry are neither stored nor read,
            also not with the default's.
    """

    names_secret: bytes = field(repr=False)
    entries: tuple[KeyEntry, ...] = ()
    next_number: int = 1
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def current(self, tenant: str | None) -> KeyEntry | None:
        """Return the newest entry of a tenant. Pure."""
        return next((entry for entry in reversed(self.entries) if entry.tenant == tenant), None)

    def entry(self, number: int) -> KeyEntry | None:
        """Return the entry of that number, None where there is none. Pure."""
        return next((entry for entry in self.entries if entry.number == number), None)

    def tenants(self) -> list[str]:
        """Return the tenants that have an entry, in order. Pure."""
        return sorted({entry.tenant for entry in self.entries if entry.tenant is not None})


def make_ring() -> KeyRing:
    """Return a ring without entries and with a new secret for names."""
    return KeyRing(secrets.token_bytes(SECRET_BYTES))


def add_entry(ring: KeyRing, tenant: str | None, now_s: float) -> KeyRing:
    """Return the ring with a new entry, which becomes the current one of its tenant.

    Args:
        ring: the ring.
        tenant: whose; None for the default.
        now_s: wall clock.

    Raises:
        ConfigError: the name is empty or too long, or the numbers are used up.
    """
    if tenant is not None and not _is_tenant(tenant):
        remedy = f"must be a name of 1 to {MAX_TENANT_CHARS} printable characters"
        raise ConfigError("tenant", tenant, remedy, max_value_chars=80)
    if ring.next_number > MAX_NUMBER:
        raise ConfigError("key_file", ring.next_number, "every number is used: create a new ring")
    entry = KeyEntry(ring.next_number, int(now_s), secrets.token_bytes(SECRET_BYTES), tenant)
    return replace(ring, entries=(*ring.entries, entry), next_number=ring.next_number + 1)


def drop_tenant(ring: KeyRing, tenant: str) -> KeyRing:
    """Return the ring without the entries of a tenant, whose blocks nothing can read from now on. Pure.

    Raises:
        ConfigError: it has none.
    """
    gone = tuple(entry.number for entry in ring.entries if entry.tenant == tenant)
    if not gone:
        known = ", ".join(ring.tenants()) or "none"
        raise ConfigError(
            "--tenant", tenant, f"has no entry in the ring: those with one are {known}", max_value_chars=80
        )
    left = tuple(entry for entry in ring.entries if entry.tenant != tenant)
    dropped = {**ring.dropped, tenant: (*ring.dropped.get(tenant, ()), *gone)}
    return replace(ring, entries=left, dropped=dropped)


def require_entry(ring: KeyRing, tenant: str | None) -> None:
    """Refuse a ring with which an engine could encrypt nothing. Pure.

    Args:
        ring: the ring.
        tenant: whose entry encrypts blocks without a tenant; None: the default, which may be missing beside others.

    Raises:
        ConfigError: it has no entry, or none of this tenant.
    """
    if not ring.entries:
        raise ConfigError("encryption", tenant, "the ring has no entry: `kvtier keys rotate` makes one")
    if tenant is not None and ring.current(tenant) is None:
        remedy = "the ring has no entry of this tenant: `kvtier keys rotate --tenant` makes one"
        raise ConfigError("encryption", tenant, remedy, max_value_chars=80)


def format_ring(ring: KeyRing) -> str:
    """Return the contents of a ring's file. Pure."""
    entries = [
        {
            "number": entry.number,
            "created_s": entry.created_s,
            "secret": entry.secret.hex(),
            "tenant": entry.tenant,
        }
        for entry in ring.entries
    ]
    found = {
        "kvtier_keys": FORMAT_VERSION,
        "names": ring.names_secret.hex(),
        "next_number": ring.next_number,
        "entries": entries,
        "dropped": ring.dropped,
    }
    return json.dumps(found, indent=1) + "\n"


def parse_ring(text: str, where: str) -> KeyRing:
    """Return the ring that a file holds. Pure.

    Args:
        text: the file's contents; no message repeats any of it but numbers and versions.
        where: the file, for the message.

    Raises:
        ConfigError: it is none, or of another version, or a part of it is wrong.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(where, "is no JSON: restore it, or make one with `kvtier keys create`") from None
    if not isinstance(found, dict) or "kvtier_keys" not in found:
        raise _wrong(where, "is no key ring: make one with `kvtier keys create`")
    version = found["kvtier_keys"]
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise _wrong(
            where, f"is of version {version!r:.20}, this kvtier reads {FORMAT_VERSION}: update kvtier"
        )
    if set(found) != _FIELDS:
        raise _wrong(where, "lacks a field or has an unknown one: restore it")
    entries = _parse_entries(found["entries"], where)
    next_number = found["next_number"]
    newest = entries[-1].number if entries else 0
    if not _is_whole(next_number, newest + 1, MAX_NUMBER + 1):
        raise _wrong(where, "has a next_number that was given already: restore it")
    names = _parse_secret(found["names"], "names", where)
    return KeyRing(names, entries, next_number, _parse_dropped(found["dropped"], where))


def read_ring(path: Path) -> KeyRing:
    """Return the ring in a file.

    Raises:
        ConfigError: there is no such file, others may read it or own it, or it is no ring.
    """
    return read_ring_and_stamp(path)[0]


Stamp = tuple[int, int, int, int]
"""What changes when a file is replaced or written: inode, nanoseconds of both its times, length."""


def read_ring_and_stamp(path: Path) -> tuple[KeyRing, Stamp]:
    """Return the ring in a file and the stamp of what was read.

    Raises:
        ConfigError: as ``read_ring``.
    """
    where = str(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _wrong(where, "does not exist: make it with `kvtier keys create`") from None
    except OSError as error:
        raise _wrong(where, f"cannot be read ({error.strerror}): give a file of this user") from None
    try:
        # Secrets are mounted as links. What counts is whose the file is in the end, and who may read it.
        status = os.fstat(fd)
        _require_private(status, where)
        data = b"".join(iter(lambda: os.read(fd, 2**20), b""))
    except OSError as error:
        raise _wrong(where, f"cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _wrong(where, "is no JSON: restore it, or make one with `kvtier keys create`") from None
    return parse_ring(text, where), stamp_of(status)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what changes when a file is replaced or written. Pure."""
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def write_ring(path: Path, ring: KeyRing, *, is_new: bool = False) -> None:
    """Replace the file of a ring whole; after a crash there is the old one or the new one.

    Args:
        path: the file; its folder exists. Of a link, the file that it leads to is replaced.
        ring: what it is to hold.
        is_new: whether a file that is there is left alone.

    Raises:
        ConfigError: it is there already, or the system refused.
    """
    if not is_new:
        path = _follow(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), FILE_MODE)
                file.write(format_ring(ring))
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                os.link(temporary, path)
            else:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except FileExistsError:
        raise _wrong(str(path), "exists already: give another name, or add to it with `rotate`") from None
    except OSError as error:
        raise _wrong(str(path), f"cannot be written: {error.strerror}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the ring of the same folder meanwhile.

    Raises:
        ConfigError: the folder cannot be opened.
    """
    try:
        fd = os.open(_follow(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _wrong(str(path), f"its folder cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _follow(path: Path) -> Path:
    """Return the file that ``path`` leads to.

    Raises:
        ConfigError: its links lead in a circle.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # RuntimeError: Python before 3.13 names a circle so
        raise _wrong(str(path), "is a link that leads in a circle: give the file of a key ring") from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _require_private(status: os.stat_result, where: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _wrong(where, "is no regular file: give the file of a key ring")
    if status.st_uid != os.geteuid():
        raise _wrong(where, f"belongs to user {status.st_uid}: give a file of this user, {os.geteuid()}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise _wrong(where, f"may be read or written by others (mode {mode:04o}): chmod 600")
    if status.st_size > MAX_FILE_BYTES:
        raise _wrong(where, f"has {status.st_size} bytes: no ring is longer than {MAX_FILE_BYTES}")


def _parse_entries(found: object, where: str) -> tuple[KeyEntry, ...]:
    if not isinstance(found, list):
        raise _wrong(where, "has no list of entries: restore it")
    parsed = tuple(sorted((_parse_entry(one, where) for one in found), key=lambda entry: entry.number))
    for entry, following in pairwise(parsed):
        if entry.number == following.number:
            raise _wrong(where, f"has the number {entry.number} twice: restore it")
    return parsed


def _parse_entry(found: object, where: str) -> KeyEntry:
    if not isinstance(found, dict) or set(found) != _ENTRY_FIELDS:
        raise _wrong(where, "has an entry that lacks a field or has an unknown one: restore it")
    number, created_s, tenant = found["number"], found["created_s"], found["tenant"]
    if not _is_whole(number, 1, MAX_NUMBER):
        raise _wrong(where, "has an entry whose number is none from 1 to 2^32 - 1: restore it")
    if not _is_whole(created_s, 0, 2**62):
        raise _wrong(where, f"entry {number} has no time: restore it")
    if tenant is not None and not _is_tenant(tenant):
        raise _wrong(where, f"entry {number} has a tenant that is no name: restore it")
    return KeyEntry(number, created_s, _parse_secret(found["secret"], f"entry {number}", where), tenant)


def _parse_dropped(found: object, where: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(found, dict) or not all(map(_is_tenant, found)):
        raise _wrong(where, "has dropped tenants that are no names: restore it")
    for numbers in found.values():
        if not isinstance(numbers, list) or not all(_is_whole(one, 1, MAX_NUMBER) for one in numbers):
            raise _wrong(where, "has dropped entries that are no numbers: restore it")
    return {name: tuple(numbers) for name, numbers in found.items()}


def _parse_secret(found: object, what: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(found) if isinstance(found, str) else b""
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise _wrong(where, f"{what}: a secret must be {SECRET_BYTES} bytes in hex: restore it")
    return secret


def _is_whole(value: object, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _is_tenant(value: object) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TENANT_CHARS:
        return False
    return value.isprintable()  # so it has no lone surrogate, which has no bytes, and moves no cursor


def _wrong(where: str, remedy: str) -> ConfigError:
    return ConfigError("key_file", where, remedy, max_value_chars=200)
