"""The engine's configuration, and the settings of ``extra_config`` as typed values.

A tier's own settings are arguments of its constructor and not in here. Everything is checked at construction: the error
for an unknown setting names the most similar known one, that for an invalid value the remedy.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.quantities import parse_capacity, parse_ttl, require_text, require_texts

MAX_WHOLE = 2**63 - 1
"""More than any count; larger ones overflow where they become times or sizes."""

MAX_GROUPS = 256
"""KV groups of a model: a key has one byte for the group."""

DEFAULT_LOOKUP_DEADLINE_S = 5.0
"""Seconds that a request may wait for promotions. Zero waits for one step. Larger values let slow tiers finish but
delay requests behind a hung one; smaller ones recompute blocks that were about to arrive."""

DEFAULT_MAX_TRACKER_SIZE = 64_000
"""Access counts that the reuse filter keeps. Fewer forget a key before its second use; each costs about 150 bytes."""

DEFAULT_AUDIT_RATIO = 0.001
"""Share of the requests that are computed although their prefix is held, to compare it. Higher finds wrong blocks and
slow places sooner; each such request costs what its hit would have saved."""

DEFAULT_AUDIT_LIMIT = 3
"""Wrong blocks after which nothing is loaded any more. One may be a flipped bit of a memory without ECC; four are a
fault. Zero stops at the first; more serve wrong bytes for longer."""

REMOVED_SETTINGS = {"layerwise_load": "was removed after 0.1, as it showed no gain: leave it out"}
"""Settings that earlier versions had, and what to do. Any value is refused, because none has an effect."""

E = TypeVar("E", bound=Enum)


class GroupKind(Enum):
    """How the layers of a KV group attend, which determines the part of a prefix that they need."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


class LoadIf(Enum):
    """Whether to load a hit in a secondary tier that would be faster to recompute."""

    ALWAYS = "always"
    FASTER = "faster"


class CudaCopier(Enum):
    """How to move bytes between CUDA tensors and the primary tier."""

    AUTO = "auto"
    BATCH = "batch"
    RUNS = "runs"
    STAGED = "staged"
    KERNEL = "kernel"


class HostSize(Enum):
    """How the size of the primary tier is chosen where it is no number of bytes."""

    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identity of the weights that produced the KV cache.

    Attributes:
        name: name or path of the model. It decides what may be exchanged only where ``weights`` is empty.
        revision: revision of the weights; it counts where ``name`` does.
        dtype: data type of the weights.
        config_digest: hex digest of the effective model configuration (rope scaling, window, quantisation).
        config_json: that configuration in words, a JSON object, for people to read: nothing depends on it. Empty where
            the engine gives no more than the digest.
        weights: name of the weights' bytes, such as a fingerprint of their files. Where it is set, the same bytes are
            found under any name, in any folder; empty where the bytes were not read.
    """

    name: str
    revision: str = ""
    dtype: str = ""
    config_digest: str = ""
    config_json: str = field(default="", compare=False)
    weights: str = ""


class StatePart(NamedTuple):
    """Consecutive bytes of a page of recurrent states whose numbers are of one type, such as "float32"."""

    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    Attributes:
        block_size_tokens: tokens in one device block.
        layer_names: the layers, in the order of their bytes in a row.
        page_size_bytes: bytes of one device block over all layers of the group on one worker, unpadded.
        kind: full attention, sliding window or state space.
        window_tokens: length of the sliding window; None unless ``kind`` is WINDOW.
        is_replicated: whether every worker holds the same bytes.
        workers_per_part: consecutive workers that hold the same bytes, where there are fewer parts than workers; with
            ``is_replicated`` it says nothing.
        state_parts: what a page of recurrent states consists of, over all layers in order, for the audit; empty where
            unknown.
    """

    block_size_tokens: int
    layer_names: tuple[str, ...]
    page_size_bytes: int
    kind: GroupKind = GroupKind.FULL
    window_tokens: int | None = None
    is_replicated: bool = False
    workers_per_part: int = 1
    state_parts: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        if self.workers_per_part < 1:
            raise ConfigError("workers_per_part", self.workers_per_part, "at least one worker holds a part")
        if self.block_size_tokens < 1:
            raise ConfigError("block_size_tokens", self.block_size_tokens, "a block holds at least one token")
        if self.page_size_bytes < 1:
            raise ConfigError("page_size_bytes", self.page_size_bytes, "a page holds at least one byte")
        if (self.kind is GroupKind.WINDOW) != (self.window_tokens is not None):
            raise ConfigError("window_tokens", self.window_tokens, "exactly the window groups have a window")
        sizes_bytes = sum(part.size_bytes for part in self.state_parts)
        if self.state_parts and (self.kind is not GroupKind.STATE or sizes_bytes != self.page_size_bytes):
            remedy = f"only states have parts, and those of a page have {self.page_size_bytes} bytes together"
            raise ConfigError("state_parts", self.state_parts, remedy)


DEFAULT_METRICS_HOST = "127.0.0.1"
"""The page has no authentication, so only this machine reads it unless another address is asked for."""

MAX_PORT = 65_535

TRACE_VARIABLE = "KVTIER_RECORD_TRACE"
"""The environment variable with the default of ``record_trace``."""

KEY_FILE_VARIABLE = "KVTIER_KEY_FILE"
"""Names the key ring where ``encryption`` does not: a path, as what stands in an environment can be read by others."""


@dataclass(frozen=True, slots=True)
class EncryptionSettings:
    """How secondary tiers encrypt.

    Attributes:
        key_file: absolute path of the key ring.
        tenant: whose entry encrypts blocks without a tenant; None: the default entry.
    """

    key_file: str
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The parsed settings of ``extra_config`` without those of tiers; ``docs/guide/settings.md`` has the table.

    Attributes:
        cpu_bytes_to_use: host memory of the primary tier over all workers; AUTO: what the machine can spare; None when
            not given.
        eviction_policy: name of the primary tier's policy.
        store_threshold: accesses of a key before it is stored; below 2 the reuse filter is off.
        max_tracker_size: access counts kept by the reuse filter.
        block_size: tokens in an offloaded block; None: one device block.
        offload_prompt_only: whether to store only blocks whose tokens are all of the prompt.
        spec_name: registered name of the offloading spec.
        spec_module_path: module of a spec that is not registered; that spec's own settings are not checked.
        lookup_deadline_s: seconds a request may wait for promotions.
        load_if: whether to load a hit that would be faster to recompute.
        audit_ratio: share of the requests that are computed and compared with what is held; 0: none.
        audit_limit: blocks that may turn out wrong before loading stops.
        audit_seed: seed of the draws that choose these requests.
        cuda_copier: how to move bytes between CUDA tensors and the primary tier.
        instance_id: name of this engine's shared-memory region; None: the engine's id.
        tenant_salt: separates tenants that must not share blocks.
        trust_multi_modal_uuids: whether a name that a client gives an image stands for the same image after a restart.
        tenants: what each tenant of requests may keep, by name (``kvtier.tenants``); None: requests have no tenants.
        ttl_s: seconds after which a block in host memory is a miss; None: never.
        record_trace: absolute path of a trace of the requests; None: no recording.
        record_max_bytes: size limit of that file; None: the recorder's default.
        record_salt_file: file with the secret that salts the trace's ids; None: a random one.
        control_socket: whether the scheduler half listens for its operators.
        metrics_port: port on which the engine's metrics are served; 0 takes a free one, None serves none.
        metrics_host: the address to serve them on.
        encryption: how secondary tiers encrypt; None: not at all.
        secondary_tiers: one mapping per tier, in the order of lookups.
    """

    cpu_bytes_to_use: int | HostSize | None = None
    eviction_policy: str = "lru"
    store_threshold: int = 0
    max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE
    block_size: int | None = None
    offload_prompt_only: bool = False
    spec_name: str | None = None
    spec_module_path: str | None = None
    lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S
    load_if: LoadIf = LoadIf.ALWAYS
    audit_ratio: float = DEFAULT_AUDIT_RATIO
    audit_limit: int = DEFAULT_AUDIT_LIMIT
    audit_seed: int = 0
    cuda_copier: CudaCopier = CudaCopier.AUTO
    instance_id: str | None = None
    tenant_salt: str = field(default="", repr=False)
    trust_multi_modal_uuids: bool = False
    tenants: Mapping[str, Any] | None = None  # Any: parsed by make_tenants, which knows the tiers
    ttl_s: float | None = None
    record_trace: str | None = None
    record_max_bytes: int | None = None
    record_salt_file: str | None = None
    control_socket: bool = True
    metrics_port: int | None = None
    metrics_host: str = DEFAULT_METRICS_HOST
    encryption: EncryptionSettings | None = None
    secondary_tiers: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # Any: tiers parse them


def parse_settings(extra_config: Mapping[str, Any]) -> Settings:  # Any: this is where values get types
    """Check and type the settings of ``extra_config``.

    Raises:
        UnknownNameError: a setting is unknown; the error names the most similar known one.
        ConfigError: a value of the wrong type or range, or a setting that was removed.
    """
    require_texts("extra_config", extra_config)
    for name in sorted(REMOVED_SETTINGS.keys() & extra_config.keys()):
        raise ConfigError(name, extra_config[name], REMOVED_SETTINGS[name])
    known = set(Settings.__dataclass_fields__)
    unknown = sorted(set(extra_config) - known)
    if unknown and "spec_module_path" not in extra_config:
        raise UnknownNameError("setting", unknown[0], known)
    read = SettingsReader(extra_config)
    return Settings(
        cpu_bytes_to_use=read.size_or("cpu_bytes_to_use", HostSize.AUTO),
        eviction_policy=read.text("eviction_policy", "lru"),
        store_threshold=read.whole("store_threshold", 0, minimum=0),
        max_tracker_size=read.whole("max_tracker_size", DEFAULT_MAX_TRACKER_SIZE, minimum=1),
        block_size=read.whole("block_size", 0, minimum=0) or None,
        offload_prompt_only=read.flag("offload_prompt_only", default=False),
        spec_name=read.text("spec_name", "") or None,
        spec_module_path=read.text("spec_module_path", "") or None,
        lookup_deadline_s=read.seconds("lookup_deadline_s", DEFAULT_LOOKUP_DEADLINE_S),
        load_if=read.choice("load_if", LoadIf.ALWAYS),
        audit_ratio=read.ratio("audit_ratio", DEFAULT_AUDIT_RATIO),
        audit_limit=read.whole("audit_limit", DEFAULT_AUDIT_LIMIT, minimum=0),
        audit_seed=read.whole("audit_seed", 0, minimum=0),
        cuda_copier=read.choice("cuda_copier", CudaCopier.AUTO),
        instance_id=read.text("instance_id", "") or None,
        tenant_salt=read.text("tenant_salt", ""),
        trust_multi_modal_uuids=read.flag("trust_multi_modal_uuids", default=False),
        tenants=extra_config.get("tenants"),
        ttl_s=read.ttl("ttl_s"),
        record_trace=read.text("record_trace", "") or None,
        record_max_bytes=read.size_bytes("record_max_bytes", None),
        record_salt_file=read.text("record_salt_file", "") or None,
        control_socket=read.flag("control_socket", default=True),
        metrics_port=read.port("metrics_port"),
        metrics_host=read.text("metrics_host", DEFAULT_METRICS_HOST),
        encryption=parse_encryption(extra_config.get("encryption"), os.environ),
        secondary_tiers=parse_tier_list(extra_config.get("secondary_tiers", [])),
    )


def parse_encryption(value: object, environ: Mapping[str, str]) -> EncryptionSettings | None:
    """Return how tiers encrypt, None for not at all. Pure.

    Raises:
        ConfigError: it is no such setting, or nothing says where the key ring is.
    """
    if value is None or value is False:
        return None
    found = {} if value is True else value
    if not isinstance(found, Mapping) or set(found) - {"key_file", "tenant"}:
        remedy = 'must be {"key_file": "/path"}, with "tenant": "name" if need be, or true or false'
        raise ConfigError("encryption", value, remedy, max_value_chars=80)
    path = found.get("key_file", environ.get(KEY_FILE_VARIABLE))
    if not isinstance(path, str) or not Path(path).is_absolute() or "\0" in path:
        remedy = f'must be the absolute path of a key ring, in "key_file" or {KEY_FILE_VARIABLE}'
        raise ConfigError("encryption", path, remedy, max_value_chars=80)
    tenant = found.get("tenant")
    if tenant is not None and (not isinstance(tenant, str) or not tenant):
        raise ConfigError("encryption", tenant, "tenant must be a name", max_value_chars=80)
    return EncryptionSettings(path, tenant)


def parse_tier_list(value: object) -> tuple[Mapping[str, Any], ...]:  # Any: each tier checks its own
    """Check that ``secondary_tiers`` is a list of mappings and copy it.

    Raises:
        ConfigError: it is anything else.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
        raise ConfigError("secondary_tiers", value, 'must be a list such as [{"type": "fs", ...}]')
    return tuple(dict(entry) for entry in value)


class SettingsReader:
    """Typed, checked access to a mapping that came from JSON or a command line.

    Args:
        values: the mapping; it is not changed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:  # Any: this is where values get types
        self._values = values

    def text(self, name: str, default: str) -> str:
        """Return a string setting."""
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(name, value, "must be a string")
        return require_text(name, value)

    def whole(self, name: str, default: int, minimum: int) -> int:
        """Return an integer setting of at least ``minimum``."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(name, value, f"must be a whole number of at least {minimum}")
        if value > MAX_WHOLE:
            raise ConfigError(name, value, "must be below 2^63")
        return value

    def port(self, name: str) -> int | None:
        """Return a port, 0 to 65535, None when it is not given."""
        value = self._values.get(name)
        is_port = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PORT
        if value is not None and not is_port:
            raise ConfigError(name, value, f"must be a port, 0 to {MAX_PORT}; 0 takes a free one")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean setting."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(name, value, "must be true or false")
        return value

    def seconds(self, name: str, default: float) -> float:
        """Return a duration in seconds, zero included."""
        value = self._values.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max:
            raise ConfigError(name, value, "must be a number of seconds, zero or more")
        return float(value)

    def ttl(self, name: str) -> float | None:
        """Return a time to live in seconds, more than zero; None when it is not given."""
        value = self._values.get(name)
        return None if value is None else parse_ttl(name, value)

    def ratio(self, name: str, default: float) -> float:
        """Return a share, 0 to 1."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(name, value, "must be a share of the requests from 0 to 1, such as 0.001")
        return float(value)

    def size_bytes(self, name: str, default: int | None) -> int | None:
        """Return a size in bytes, see ``parse_capacity``."""
        value = self._values.get(name)
        return default if value is None else parse_capacity(name, value)

    def size_or(self, name: str, choice: E) -> int | E | None:
        """Return a size in bytes, ``choice`` where its word stands in place of one, or None when not given."""
        value = self._values.get(name)
        if value is None or value in (choice, choice.value):
            return None if value is None else choice
        return parse_capacity(name, value, also=f"; or {choice.value!r}")

    def choice(self, name: str, default: E) -> E:
        """Return a member of the enum of ``default``."""
        value = self._values.get(name, default.value)
        for member in type(default):
            if value in (member, member.value):
                return member
        known = ", ".join(repr(member.value) for member in type(default))
        raise ConfigError(name, value, f"must be one of {known}")


@dataclass(frozen=True, slots=True)
class OffloadingConfig:
    """The configuration that an engine reports; equal in every process of one engine except for ``rank``.

    Attributes:
        engine_id: names this engine among others on the machine.
        model: identity of the weights.
        groups: the KV groups, in the engine's order; their index is part of every key.
        hash_block_size: tokens covered by one content hash.
        hash_algorithm: name of the chained hash.
        hash_seed: seed of the hash; a random one cannot be shared with a later process.
        kv_layout: order of the bytes within a page, as the engine names it.
        kv_dtype: data type of keys and values, with fixed scales where it has them.
        rank: this worker's number; None on the scheduler's side.
        world_size: workers of the engine.
        tensor_parallel_size: workers that split heads.
        pipeline_parallel_size: workers that split layers.
        context_parallel_size: workers that split tokens.
        num_hosts: machines the workers are on.
        has_local_workers: whether the engine knows that its workers and its scheduler are on one machine. Otherwise
            each keeps its own rows in host memory alone, whatever they hold alike.
        enable_events: whether managers record OffloadingEvents.
        engine_kind: which engine laid out the bytes, for example "transformers".
        engine_host_bytes: host memory that the engine takes for itself, all of its processes together; None: unknown.
            Equal in every process, so from facts that do not change, not from what is in use.
        engines_per_host: engines that share the memory of this host, such as replicas of one server.
        computes_last_token: whether the engine, when a load has brought a whole prompt, computes its last token again.
        audits_first_hits: whether a few of the first hits after a start are audited, unless ``audit_ratio`` is 0.
        extra_config: the settings, as the user wrote them.
        settings: the same, parsed.
    """

    engine_id: str
    model: ModelIdentity
    groups: tuple[KVGroup, ...]
    hash_block_size: int
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    kv_layout: str = ""
    kv_dtype: str = ""
    rank: int | None = None
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    num_hosts: int = 1
    has_local_workers: bool = True
    enable_events: bool = False
    engine_kind: str = ""
    engine_host_bytes: int | None = None
    engines_per_host: int = 1
    computes_last_token: bool = False
    audits_first_hits: bool = False
    # Neither is part of the repr: a tier's URL may carry a password, and a repr goes into logs.
    extra_config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # Any: parsed below
    settings: Settings = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", parse_settings(self.extra_config))
        if not self.groups:
            raise ConfigError("groups", self.groups, "a model needs at least one KV group")
        if len(self.groups) > MAX_GROUPS:
            raise ConfigError("groups", len(self.groups), f"a key names at most {MAX_GROUPS} KV groups")
        if self.hash_block_size < 1:
            raise ConfigError("hash_block_size", self.hash_block_size, "must be at least one token")
        if self.num_hosts != 1:
            remedy = "one primary tier serves the workers of one host; start one engine per host"
            raise ConfigError("num_hosts", self.num_hosts, remedy)
        for group in self.groups:
            if group.block_size_tokens % self.hash_block_size:
                remedy = f"must be a multiple of the hash block size, {self.hash_block_size} tokens"
                raise ConfigError("block_size_tokens", group.block_size_tokens, remedy)
        self._check_block_size()

    @property
    def block_size_factor(self) -> int:
        """Device blocks in one offloaded block."""
        if self.settings.block_size is None:
            return 1
        return self.settings.block_size // self.groups[0].block_size_tokens

    @property
    def workers_per_part(self) -> int:
        """How many consecutive workers hold the same bytes of every group; a row that they share has these once."""
        shared = (self.world_size if group.is_replicated else group.workers_per_part for group in self.groups)
        return math.gcd(self.world_size, *shared)

    def _check_block_size(self) -> None:
        block_size = self.settings.block_size
        if block_size is None:
            return
        sizes = {group.block_size_tokens for group in self.groups}
        if len(sizes) > 1:
            remedy = f"cannot be set when groups have different device block sizes ({sorted(sizes)})"
            raise ConfigError("block_size", block_size, remedy)
        if block_size != min(sizes) and any(group.kind is GroupKind.STATE for group in self.groups):
            remedy = "cannot join device blocks of a recurrent state, of which the engine keeps the last: leave it out"
            raise ConfigError("block_size", block_size, remedy)
        if block_size % min(sizes):
            remedy = f"must be a multiple of the device block size, {min(sizes)} tokens"
            raise ConfigError("block_size", block_size, remedy)
