"""Identity of the bytes: what two instances must have in common to exchange blocks.

Everything that changes the bytes of a row, or their order, goes into one canonical JSON text, and its SHA-256 is
the namespace's digest. The rank is not part of it, because tiers store whole rows. Any difference makes a different
namespace, so a difference costs a miss and is never a guess.

A tier keeps the same in words beside its blocks, the namespace's document, with two differences. It has the model's
configuration itself and not only its digest. And of a tenant's salt it has a short tag of a slow digest: who reads a
place needs a tenth of a second and 32 MiB for each salt that he guesses.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, NamespaceDocumentError

LAYOUT_VERSION = 2
"""Increased when the meaning of a row's bytes changes, so that old data is a miss."""

SLOW_DIGEST = {"n": 2**15, "r": 8, "p": 1, "maxmem": 2**26, "dklen": 32}
"""Cost of one guess of a salt, for ``hashlib.scrypt``: about a tenth of a second and 32 MiB. An engine pays it once at
its start. Other values make other namespaces of every tenant."""

TENANT_TAG_CHARS = 16
"""Hex digits that tell tenants apart; more add nothing for people."""

NO_SALT_DIGEST = hashlib.sha256(b"").hexdigest()
"""What stands in the identity of an engine without a salt. Older documents have the SHA-256 of each salt."""

OLDER_TENANT = "set, in the form of an older version"
"""What is said of a document that still has the SHA-256 of a salt, which is not shown."""

NAMES_OF_WEIGHTS = ("name", "revision")
"""What people call a model. It is part of the identity only where the weights are not named by their bytes; a document
has it in either case."""

ABSENT = "(absent)"
MAX_DEPTH = 32
"""Levels of a document that are compared; a model's configuration has about five."""

MAX_SHOWN_CHARS = 120

RANDOM_SEED = "random"
"""The ``hash_seed`` of an engine whose next process would hash the same tokens differently."""


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """The identity of one engine's blocks.

    Attributes:
        document: JSON of everything that determines the bytes, for people to read; no secret is in it.
        digest: of all of that, 32 bytes.
    """

    document: str
    digest: bytes

    @property
    def name(self) -> str:
        """The first 16 bytes of the digest in hex: short enough for a path, long enough for a key."""
        return self.digest[:16].hex()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NamespacePage:
    """What a model computed of a few tokens; two models of one name differ in it.

    A tier keeps the first engine's beside the namespace's document.

    Attributes:
        data: that, as bytes.
        differs: returns in what another page differs, "" where it is that of the same model. Thread: any.
    """

    data: bytes = dataclasses.field(repr=False)
    differs: Callable[[bytes], str] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ProbedModel(ModelIdentity):
    """The identity of a model that has computed a page, which is no part of it.

    Attributes:
        page: what it computed; None of a model that was not asked.
    """

    page: NamespacePage | None = dataclasses.field(default=None, compare=False, repr=False)


def make_namespace(config: OffloadingConfig, row_stride_bytes: int, epoch: bytes = b"") -> Namespace:
    """Derive the namespace of an engine's blocks. Pure; with a new ``tenant_salt`` it takes a tenth of a second, once.

    Args:
        config: the engine's configuration.
        row_stride_bytes: bytes of one row of the primary tier.
        epoch: 16 random bytes after a reset, empty before the first.
    """
    model = _fields_of(config.model)
    del model["config_json"]
    if model["weights"]:
        for name in NAMES_OF_WEIGHTS:
            del model[name]
    salt = config.settings.tenant_salt
    identity = {
        "layout_version": LAYOUT_VERSION,
        "engine": config.engine_kind,
        "model": model,
        "kv_dtype": config.kv_dtype,
        "kv_layout": config.kv_layout,
        "block_size_factor": config.block_size_factor,
        "hash_block_size": config.hash_block_size,
        "hash_algorithm": config.hash_algorithm,
        "hash_seed": config.hash_seed,
        "groups": [_describe_group(group) for group in config.groups],
        "row_stride_bytes": row_stride_bytes,
        "world_size": config.world_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "tenant_salt": digest_salt(salt) if salt else NO_SALT_DIGEST,
        "epoch": epoch.hex(),
    }
    # Rows of before, with every worker's bytes, are those of another namespace.
    if config.workers_per_part > 1:
        is_whole = config.workers_per_part == config.world_size
        identity["parts"] = "once" if is_whole else f"once for {config.workers_per_part} workers"
    text = json.dumps(identity, sort_keys=True, indent=1)
    del identity["tenant_salt"]
    words = {"model": model_in_words(config.model), "tenant": tag_tenant(salt)}
    document = json.dumps(identity | words, sort_keys=True, indent=1)
    return Namespace(document, hashlib.sha256(text.encode()).digest())


def describe_groups(groups: Sequence[KVGroup]) -> str:
    """Return one line with the kind and number of layers of each group. Pure."""
    return ", ".join(f"{group.kind.value} x{len(group.layer_names)}" for group in groups)


def model_in_words(model: ModelIdentity) -> dict[str, object]:
    """Return what a document says of a model. Pure."""
    words = _fields_of(model)
    return words | _config_in_words(words.pop("config_json"))


def _fields_of(model: ModelIdentity) -> dict[str, str]:
    """Return the fields of the identity, without what an engine may add to it."""
    return {one.name: getattr(model, one.name) for one in dataclasses.fields(ModelIdentity)}


def _describe_group(group: KVGroup) -> dict[str, object]:
    """Return what decides the bytes of a group on one worker. Pure."""
    described = dataclasses.asdict(group) | {"kind": group.kind.value}
    del described["is_replicated"], described["workers_per_part"], described["state_parts"]
    return described


@functools.lru_cache(maxsize=16)
def digest_salt(salt: str) -> str:
    """Return a digest of a tenant's salt that is slow to compute, in hex. Pure.

    It is the same for every model, so that one tenant's namespaces can be told from another's. The namespace's digest
    is made with it: with a quick one a folder's name and its document together would confirm a guess at once.

    Source: scrypt, RFC 7914.
    """
    return hashlib.scrypt(salt.encode(), salt=b"kvtier tenant", **SLOW_DIGEST).hex()


def tag_tenant(salt: str) -> str:
    """Return what stands for a tenant in a document, 16 hex digits; empty without a salt. Pure."""
    if not salt:
        return ""
    # Not the beginning of the digest itself, which is a part of the identity.
    return hashlib.sha256(f"tag {digest_salt(salt)}".encode()).hexdigest()[:TENANT_TAG_CHARS]


def hide_tenant(document: str) -> str:
    """Return the document of a namespace whose blocks are encrypted: nothing in it is made from a salt. Pure."""
    found = json.loads(document)
    found.pop("tenant", None)
    return json.dumps(found | {"encryption": "AES-256-GCM"}, sort_keys=True, indent=1)


Document = Mapping[str, Any]  # Any: it came from a disk
"""A namespace's document as JSON has it."""


def parse_document(text: str) -> Document:
    """Return what a namespace's document says, in the form of today; the digest of a salt is taken out. Pure.

    Raises:
        NamespaceDocumentError: it is no such document.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NamespaceDocumentError(text, str(error)) from error
    if not isinstance(found, dict) or "layout_version" not in found:
        raise NamespaceDocumentError(text, "it does not describe a namespace")
    salt_digest = found.pop("tenant_salt", None)
    if salt_digest is not None:
        found["tenant"] = "" if salt_digest == NO_SALT_DIGEST else OLDER_TENANT
    return found


def is_older_layout(document: Document) -> bool:
    """Return whether the blocks of a parsed document are of a layout that this version no longer reads. Pure."""
    version = document.get("layout_version")
    return isinstance(version, int) and not isinstance(version, bool) and version < LAYOUT_VERSION


class Difference(NamedTuple):
    """A field in which two namespaces differ.

    Attributes:
        field: its name, with dots: "model.config.rope_scaling.factor".
        value_a: what the first has, as text; "(absent)" when it has none.
        value_b: what the second has.
    """

    field: str
    value_a: str
    value_b: str


def differences(document_a: str, document_b: str) -> list[Difference]:
    """Return the fields in which the documents of two namespaces differ, those of the model first. Pure.

    Of a list of plain values only the first that differs is named. Where one of the two documents has no words for the
    model's configuration the digests are compared. Of two layout versions only these are named: other fields of another
    version may mean something else, and equal ones would change nothing.

    Args:
        document_a: ``Namespace.document``, or what a ``namespace.json`` holds.
        document_b: the other.

    Raises:
        NamespaceDocumentError: one of them is no such document.
    """
    a, b = parse_document(document_a), parse_document(document_b)
    versions = a["layout_version"], b["layout_version"]
    if versions[0] != versions[1]:
        return [_shown("layout_version", *versions)]
    found = [_shown(*one) for one in _compare("", a, b)]
    if _names_weights(a) and _names_weights(b):
        called = {f"model.{name}" for name in NAMES_OF_WEIGHTS}
        found = [one for one in found if one.field not in called]
    names = {one.field for one in found}
    if "model.config" in names:  # only one has it
        found = [one for one in found if one.field != "model.config"]
    elif any(name.startswith("model.config.") for name in names):
        found = [one for one in found if one.field != "model.config_digest"]
    return sorted(
        found, key=lambda one: (one.field == "epoch", not one.field.startswith("model."), one.field)
    )


def require_stable_hash(config: OffloadingConfig, tier: str) -> None:
    """Refuse a random hash seed where blocks outlive the process.

    Raises:
        ConfigError: the engine hashes differently at every start, so no block would be found again.
    """
    if config.hash_seed == RANDOM_SEED:
        remedy = f"tier {tier!r} outlives the process: give the engine a fixed hash seed (PYTHONHASHSEED=0)"
        raise ConfigError("hash_seed", config.hash_seed, remedy)


_NOTHING = object()
"""Stands for a value that one side has not."""


def _names_weights(document: Document) -> bool:
    """Return whether a document names the weights by their bytes."""
    model = document.get("model")
    return isinstance(model, dict) and bool(model.get("weights"))


def _config_in_words(config_json: str) -> dict[str, object]:
    """Return the entry of a document for a model's configuration; none where there are no words for it."""
    try:
        words = json.loads(config_json) if config_json else None
    except (ValueError, RecursionError):
        return {}
    return {"config": words} if isinstance(words, dict) else {}


def _compare(name: str, a: object, b: object, depth: int = 0) -> Iterator[tuple[str, object, object]]:
    """Yield the names below ``name`` whose values differ, with both values."""
    if a == b and type(a) is type(b):
        return
    start = f"{name}." if name else ""
    if isinstance(a, dict) and isinstance(b, dict) and depth < MAX_DEPTH:
        for key in sorted(a.keys() | b.keys()):
            yield from _compare(f"{start}{key}", a.get(key, _NOTHING), b.get(key, _NOTHING), depth + 1)
    elif isinstance(a, list) and isinstance(b, list) and depth < MAX_DEPTH:
        yield from _compare_lists(start, a, b, depth)
    else:
        yield name, a, b


def _compare_lists(
    start: str, a: list[object], b: list[object], depth: int
) -> Iterator[tuple[str, object, object]]:
    for position in range(max(len(a), len(b))):
        one = a[position] if position < len(a) else _NOTHING
        other = b[position] if position < len(b) else _NOTHING
        found = list(_compare(f"{start}{position}", one, other, depth + 1))
        yield from found
        if found and not isinstance(one, dict):
            return


def _shown(field: str, a: object, b: object) -> Difference:
    return Difference(_as_text(field), _as_text(a), _as_text(b))


def _as_text(value: object) -> str:
    if value is _NOTHING:
        return ABSENT
    # A document may come from anyone who can write to a place: no line end or escape sequence of it reaches a terminal.
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value, sort_keys=True)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
