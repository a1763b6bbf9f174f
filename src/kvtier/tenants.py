"""Tenants of requests: who they are, what their keys are made with, how much each may keep.

An engine that serves several tenants names them in its setting ``tenants``; a request names its own in
``kv_transfer_params["tenant"]``. A tenant's blocks have keys that no other tenant's request makes: the content hash is
made anew with a key of the tenant, so that prompts that are equal have different hashes, and seven bytes behind it
have the tenant's number, by which places count, purge and evict. Both are keyed with the engine's ``tenant_salt``: who
may choose names must not find one whose number is that of another tenant.

Without the setting there are no tenants of requests, and nothing of this is called.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kvtier.base import GROUP_INDEX_BYTES, TENANT_BYTES, TENANT_MARK, TENANT_SUFFIX_BYTES, OffloadKey
from kvtier.config import Settings
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.hints.values import MAX_NAME_CHARS, RequestHints
from kvtier.hints.values import TENANT as TENANT_PARAMETER
from kvtier.namespace import digest_salt
from kvtier.quantities import parse_capacity

OTHERS = "*"
"""The name under which ``tenants`` has the settings of all names that it does not list. It is no tenant's own."""

HOST = "host"
"""The name of host memory among the tiers of ``quota_bytes``."""

UNNAMED_LABEL = "(none)"
"""What stands for requests that name no tenant, where blocks are counted."""

OTHERS_LABEL = "(others)"
"""What stands for all tenants together that ``tenants`` does not list, so that clients cannot make labels."""

HASH_KEY_BYTES = 32

MAX_SHOWN_CHARS = 80

QUOTA = "quota_bytes"
TENANTS_FORM = 'must name each tenant with its settings, such as {"alice": {"quota_bytes": "8GiB"}, "*": {}}'


class Tenant(NamedTuple):
    """The tenant of a request.

    Attributes:
        name: as the request gives it; empty where it names none.
        number: in the keys of its blocks; 0 where it names none.
        hash_key: what its content hashes are made anew with; empty where they stay as they are.
    """

    name: str
    number: int
    hash_key: bytes

    def own_hash(self, block_hash: bytes) -> bytes:
        """Return the tenant's hash of a block with this content hash. Pure."""
        return salt_hash(block_hash, self.hash_key) if self.hash_key else block_hash


NO_TENANT = Tenant("", 0, b"")
"""The tenant of requests that name none, and of every request without the setting."""


def tenant_number(name: str, salt: str = "") -> int:
    """Return the number of a tenant, below 2^56 and no multiple of 2^24. Pure; a new salt takes a tenth of a second.

    Two names with one number would share what goes by number: accounting, quota, purge. Their blocks would stay apart.
    With a salt no name can be searched for that has the number of another; without one that takes 2^56 tries.

    Args:
        name: of the tenant.
        salt: the engine's ``tenant_salt``; empty for none.
    """
    digest = hashlib.blake2b(
        name.encode(), digest_size=TENANT_BYTES, key=_salt_key(salt), person=b"kvtier tenant"
    ).digest()
    number = int.from_bytes(digest, "big")
    return number if number & TENANT_MARK else number | 1


def get_tenant_part(tenant: int) -> tuple[slice, bytes]:
    """Return where a key shows whether it is of ``tenant``, by its number, and what stands there then. Pure."""
    if tenant == 0:
        return slice(-GROUP_INDEX_BYTES, -1), bytes(GROUP_INDEX_BYTES - 1)
    return slice(-TENANT_SUFFIX_BYTES, -1), tenant.to_bytes(TENANT_BYTES, "big")


def _salt_key(salt: str) -> bytes:
    # The slow digest: what is made with it, and names show, must not confirm a guessed salt at once.
    return bytes.fromhex(digest_salt(salt)) if salt else b""


def salt_hash(block_hash: bytes, key: bytes) -> bytes:
    """Return another hash of the same length, made with what a block's bytes or its owner depend on. Pure.

    Args:
        block_hash: at most 64 bytes.
        key: at most 64 bytes.
    """
    return hashlib.blake2b(block_hash, key=key, digest_size=len(block_hash)).digest()


class OtherKeys(Collection[OffloadKey]):
    """The keys that an eviction must leave alone: those of other tenants, and some more. Only ``in`` has a meaning.

    Args:
        tenant: whose blocks may go; None: everybody's.
        kept: blocks that stay, in two collections whose ``in`` does not search.
    """

    def __init__(
        self, tenant: int | None, kept: tuple[Collection[OffloadKey], Collection[OffloadKey]]
    ) -> None:
        self._part: slice | None = None
        if tenant is not None:
            self._part, self._digits = get_tenant_part(tenant)
        self._named, self._protected = kept

    def __contains__(self, key: object) -> bool:
        is_other = self._part is not None and key[self._part] != self._digits  # type: ignore[index]
        return is_other or key in self._named or key in self._protected

    def __iter__(self) -> Iterator[OffloadKey]:
        raise TypeError("the keys of other tenants are not listed")

    def __len__(self) -> int:
        raise TypeError("the keys of other tenants are not counted")

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What ``tenants`` says of one tenant, or of all others.

    Attributes:
        quota_bytes: bytes that the tenant may keep where others want room, by place: ``HOST``, or the type of a tier.
    """

    quota_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of an engine. Immutable.

    Attributes:
        by_name: what the setting says of each listed tenant.
        others: what it says of all others; None: they are not served by kvtier.
        salt: the engine's ``tenant_salt``, a secret.
        names: the listed tenants by number.
    """

    by_name: Mapping[str, TenantSettings]
    others: TenantSettings | None
    salt: str = field(default="", repr=False)
    names: Mapping[int, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "names", MappingProxyType({self.number_of(name): name for name in self.by_name})
        )

    def find(self, params: Mapping[str, object] | None, hints: RequestHints) -> Tenant | None:
        """Return the tenant of a request; None where kvtier neither loads nor stores for it.

        That is one whose tenant is not listed, or that names none, where the setting has nothing for others. A name
        that is no valid one is never served: it must not share blocks with requests that name none.

        Args:
            params: the request's ``kv_transfer_params``.
            hints: what was read of them.
        """
        name = hints.tenant
        if name is None:
            is_invalid = params is not None and params.get(TENANT_PARAMETER) is not None
            return None if is_invalid or self.others is None else NO_TENANT
        if name not in self.by_name and (self.others is None or not is_name(name)):
            return None
        return self.make(name)

    def make(self, name: str) -> Tenant:
        """Return the tenant of a valid name. Pure; with a new salt it takes a tenth of a second, once."""
        hash_key = hashlib.blake2b(
            name.encode(), digest_size=HASH_KEY_BYTES, key=_salt_key(self.salt), person=b"kvtier hash key"
        ).digest()
        return Tenant(name, self.number_of(name), hash_key)

    def number_of(self, name: str) -> int:
        """Return the number of the tenant of that name. Pure."""
        return tenant_number(name, self.salt)

    def label_of(self, number: int) -> str:
        """Return the name under which a tenant's blocks are counted: its own where it is listed. Pure."""
        if number == 0:
            return UNNAMED_LABEL
        return self.names.get(number, OTHERS_LABEL)

    def labels(self) -> list[str]:
        """Return every label that ``label_of`` can give. Pure."""
        others = [] if self.others is None else [UNNAMED_LABEL, OTHERS_LABEL]
        return [*self.by_name, *others]

    def quota_of(self, number: int, tier: str) -> int | None:
        """Return the bytes that a tenant may keep in ``tier``; None: as many as there is room. Pure."""
        name = self.names.get(number)
        settings = self.others if name is None else self.by_name[name]
        return None if settings is None else settings.quota_bytes.get(tier)

    def list_quotas(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each label's tenant may keep in each place that has a quota. Pure.

        Those of ``OTHERS_LABEL`` have one each, so together they have none.
        """
        quotas = {name: dict(settings.quota_bytes) for name, settings in self.by_name.items()}
        if self.others is not None:
            quotas |= {UNNAMED_LABEL: dict(self.others.quota_bytes), OTHERS_LABEL: {}}
        return quotas

    def excesses(self, held_bytes: Mapping[int, int], place: str) -> dict[int, int]:
        """Return by how many bytes tenants are beyond their quotas in a place, those who are. Pure.

        Args:
            held_bytes: what each keeps there, by number.
            place: ``HOST``, or the type of a tier.
        """
        beyond = {}
        for number, num_bytes in held_bytes.items():
            quota_bytes = self.quota_of(number, place)
            if quota_bytes is not None and num_bytes > quota_bytes:
                beyond[number] = num_bytes - quota_bytes
        return beyond

    def has_quota(self, place: str) -> bool:
        """Return whether any tenant has a quota in ``place``. Pure."""
        others = [] if self.others is None else [self.others]
        return any(place in settings.quota_bytes for settings in (*self.by_name.values(), *others))


def is_name(value: object) -> bool:
    """Return whether ``value`` can name a tenant: valid Unicode of 1 to MAX_NAME_CHARS characters. Pure."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS or value == OTHERS:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may have half of a character
        return False
    return True


def make_tenants(settings: Settings) -> Tenants | None:
    """Return the tenants that an engine's setting ``tenants`` names; None where it is not set.

    Raises:
        ConfigError: the setting is no mapping of names to settings.
        UnknownNameError: a tenant has an unknown setting, or a quota in a tier that the engine does not have.
    """
    if settings.tenants is None:
        return None
    places = frozenset({HOST, *(str(entry.get("type")) for entry in settings.secondary_tiers)})
    return parse_tenants(settings.tenants, settings.tenant_salt, places)


def parse_tenants(value: object, salt: str, places: Collection[str]) -> Tenants:
    """Return the tenants of a setting; the arguments are ``tenants``, ``tenant_salt`` and where quotas may be.

    Raises:
        ConfigError, UnknownNameError: as ``make_tenants``.
    """
    if not isinstance(value, Mapping) or not value:
        raise ConfigError("tenants", value, TENANTS_FORM, max_value_chars=MAX_SHOWN_CHARS)
    by_name: dict[str, TenantSettings] = {}
    others = None
    for name, entry in value.items():
        if name == OTHERS:
            others = _parse_entry(name, entry, places)
        elif is_name(name):
            by_name[name] = _parse_entry(name, entry, places)
        else:
            remedy = f"the name of a tenant must be text of 1 to {MAX_NAME_CHARS} characters"
            raise ConfigError("tenants", name, remedy, max_value_chars=MAX_SHOWN_CHARS)
    return Tenants(MappingProxyType(by_name), others, salt)


def _parse_entry(name: str, entry: object, places: Collection[str]) -> TenantSettings:
    if not isinstance(entry, Mapping):
        remedy = f'tenant {_show(name)}: must be a mapping, such as {{"quota_bytes": "8GiB"}}, or {{}}'
        raise ConfigError("tenants", entry, remedy, max_value_chars=MAX_SHOWN_CHARS)
    for setting in entry:
        if setting != QUOTA:
            raise UnknownNameError(f"setting of tenant {_show(name)}", str(setting), [QUOTA])
    value = entry.get(QUOTA)
    if value is None:
        return TenantSettings()
    setting = f"{QUOTA} of tenant {_show(name)}"
    if not isinstance(value, Mapping):
        also = '; or {"host": "8GiB"}'
        return TenantSettings({HOST: parse_capacity(setting, value, also=also)})
    quotas: dict[str, int] = {}
    for place, size in value.items():
        if place not in places:
            raise UnknownNameError(f"tier in {setting}", str(place)[:MAX_SHOWN_CHARS], places)
        quotas[place] = parse_capacity(f"{setting} in {place}", size)
    return TenantSettings(MappingProxyType(quotas))


def _show(name: str) -> str:
    return repr(name[:MAX_SHOWN_CHARS])
