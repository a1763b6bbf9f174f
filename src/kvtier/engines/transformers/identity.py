"""Identity of a model's weights and configuration, for the namespace of its blocks.

The weights are named by a SHA-256 over name, dtype, shape and every byte of every tensor in memory: parameters,
buffers, those that no checkpoint has (the frequencies of rotary embeddings), and tensors that are plain attributes. The
first reading costs about a second for each gigabyte; after a change only the tensors that changed are read.
``model_revision`` replaces it when the revision is known. Configuration, adapters and code are part in either case.
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig, StatePart
from kvtier.cpu.auto_size import PROCESS_BYTES
from kvtier.engines.transformers.config import BlockSizes, EngineConfig, choose_block_sizes, page_bytes
from kvtier.engines.transformers.model_adapter import KVShape, ModelAdapter, require_served_adapters
from kvtier.engines.transformers.model_checks import make_page
from kvtier.engines.transformers.model_facts import (
    ModelFacts,
    Words,
    find_departures,
    read_facts,
    read_settings,
    read_usual_facts,
)
from kvtier.engines.transformers.model_watch import ModelLook, TensorLook
from kvtier.engines.transformers.paged_cache import KV_LAYOUT, STATE_LAYOUT
from kvtier.engines.transformers.request import HASH_ALGORITHM
from kvtier.errors import ModelError
from kvtier.namespace import ProbedModel

logger = logging.getLogger(__name__)

FINGERPRINT_THREADS = 4
"""Tensors hashed at once; hashing releases the interpreter's lock. More than the cores are no faster."""

FINGERPRINT_PREFIX = "sha256-of-all-weights:"
"""Marks a fingerprint, so that it never equals a revision that a user has named."""

ANNOUNCED = "merged_adapters"
"""The attribute of an adapter's layer that changes when the adapter is added to the weights below it. peft writes them
through ``.data``, which torch does not count, so whatever was read of tensors before is read again."""

MAX_SHOWN_VALUES = 4
"""Values of an attribute that a namespace's document shows; the digest is of all of them."""

MAX_SHOWN_CHARS = 200

ENGINE_KIND = "transformers"
"""Name of this engine in namespaces; another engine has another layout of bytes."""


def make_offloading_config(
    adapter: ModelAdapter,
    config: EngineConfig,
    extra_config: Mapping[str, Any],  # Any: kvtier.config gives the values types
    model: ModelIdentity | None = None,
) -> OffloadingConfig:
    """Describe the engine and its model.

    Args:
        adapter: the model.
        config: the engine's settings.
        extra_config: kvtier's settings.
        model: the identity of the model; None reads it.

    Raises:
        ConfigError: a setting of ``extra_config`` has a value that cannot work.
        UnknownNameError: an unknown setting.
    """
    sizes = choose_block_sizes(config, adapter.shape)
    return OffloadingConfig(
        engine_id=make_engine_id(),
        model=model or ModelNamer(adapter, config).name(),
        groups=make_groups(adapter.shape, sizes),
        hash_block_size=sizes.block_size_tokens,
        hash_algorithm=HASH_ALGORITHM,
        kv_layout=f"{KV_LAYOUT};{STATE_LAYOUT}" if adapter.shape.states else KV_LAYOUT,
        kv_dtype=str(adapter.shape.dtype),
        rank=0,
        enable_events=config.enable_events,
        engine_kind=ENGINE_KIND,
        engine_host_bytes=count_host_bytes(adapter, config),
        computes_last_token=True,
        extra_config=extra_config,
    )


def make_groups(shape: KVShape, sizes: BlockSizes) -> tuple[KVGroup, ...]:
    """Return the KV groups: keys and values, recurrent states, or both in this order. Pure."""
    groups = []
    if shape.layers:
        names = tuple(layer.name for layer in shape.layers)
        groups.append(KVGroup(sizes.block_size_tokens, names, sizes.block_size_tokens * shape.token_bytes))
    if sizes.state_interval_tokens is not None:
        # The names have type and size of each state: other states of as many bytes are another namespace.
        names = tuple(state.name for state in shape.states)
        parts = tuple(
            StatePart(str(state.dtype).removeprefix("torch."), state.nbytes) for state in shape.states
        )
        interval, num_bytes = sizes.state_interval_tokens, shape.state_bytes
        groups.append(KVGroup(interval, names, num_bytes, GroupKind.STATE, state_parts=parts))
    return tuple(groups)


def count_host_bytes(adapter: ModelAdapter, config: EngineConfig) -> int:
    """Return the host memory of the engine: its process, and what of weights and device pool is on the CPU. Pure."""
    # Tied weights are one memory under two names.
    tensors = [*adapter.model.parameters(), *adapter.model.buffers()]
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"}
    pool_bytes = config.num_device_blocks * page_bytes(
        adapter.shape, choose_block_sizes(config, adapter.shape)
    )
    # The sequence that is being computed is in the pool and, contiguous, in the model's own cache.
    pool_bytes = 2 * pool_bytes if adapter.shape.device.type == "cpu" else 0
    return PROCESS_BYTES + sum(weights.values()) + pool_bytes


def make_engine_id() -> str:
    """Return a name that is unique to this start of an engine on this machine."""
    return f"{ENGINE_KIND}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class ModelNamer:
    """Names a model, again whenever it has changed. Used from one thread.

    Args:
        adapter: the model.
        config: the engine's settings, which may name its weights.
        unread: names of facts and tensors that the model's own passes change.

    Attributes:
        model: the model.
        unread: as given.
    """

    def __init__(
        self, adapter: ModelAdapter, config: EngineConfig, unread: frozenset[str] = frozenset()
    ) -> None:
        self._adapter = adapter
        self.model = adapter.model
        self.unread = unread
        self._name = config.model_name or adapter.name
        self._revision = config.model_revision
        self._usual: tuple[str, Mapping[str, Words]] | None = None
        self._digests: dict[str, tuple[TensorLook, bytes]] = {}
        self._as_started: dict[str, TensorLook] = {}
        self._announced: Words = None
        self._is_named = False
        self._said: set[str] = set()

    def name(self) -> ModelIdentity:
        """Return the identity of the model as it is now; reads every tensor that it has not read before.

        Raises:
            ModelError: the bytes of a tensor are not in memory.
        """
        settings, nameless = read_settings(self.model)
        found = read_facts(self.model, self.unread)
        departures = find_departures(found.facts, self._usual_facts(settings))
        self._say_nameless(nameless | (found.nameless & departures.keys()) | found.typed_code)
        self._follow(found)
        tensors = {
            name: tensor
            for name, tensor in found.tensors.items()
            if name not in self._as_started or not self._as_started[name].is_same(tensor)
        }
        words: dict[str, Words] = {**settings, "departures": summarize(departures)}
        if own_code := found.digest_own_code():
            words["own_code"] = own_code
        weights = ""
        if self._revision is None:
            weights = FINGERPRINT_PREFIX + self._digest(tensors)
        elif tensors:
            # What the revision names is not read; what has come since has only its bytes.
            words["changed_tensors"] = self._digest(tensors)
        described = json.dumps(words, sort_keys=True)
        return ModelIdentity(
            name=self._name,
            revision=self._revision or "",
            dtype=str(self.model.dtype),
            config_digest=hashlib.sha256(described.encode()).hexdigest(),
            config_json=described,
            weights=weights,
        )

    def name_probed(self) -> ProbedModel:
        """Return the same with what the model computes of a few tokens, for tiers to compare.

        Raises:
            ModelError: the bytes of a tensor are not in memory.
        """
        named = self.name()
        values = {one.name: getattr(named, one.name) for one in fields(named)}
        return ProbedModel(**values, page=make_page(self._adapter))

    def _usual_facts(self, settings: Mapping[str, Words]) -> Mapping[str, Words]:
        made_with = json.dumps(settings, sort_keys=True)
        if self._usual is None or self._usual[0] != made_with:
            self._usual = made_with, read_usual_facts(self.model, self.unread)
        return self._usual[1]

    def _follow(self, found: ModelFacts) -> None:
        """Forget what is known of tensors that may have been written unseen; at first, note those that are named."""
        announced: Words = {
            name: value for name, value in found.facts.items() if name.endswith(f":{ANNOUNCED}") and value
        }
        if not self._is_named:
            self._is_named = True
            if self._revision is not None:
                self._as_started = {name: TensorLook(tensor) for name, tensor in found.tensors.items()}
        elif announced != self._announced:
            self._as_started.clear()
            self._digests.clear()
        self._announced = announced

    def _digest(self, tensors: Mapping[str, torch.Tensor]) -> str:
        known = {
            name: self._digests[name]
            for name, tensor in tensors.items()
            if name in self._digests and self._digests[name][0].is_same(tensor)
        }
        new = {name: tensor for name, tensor in sorted(tensors.items()) if name not in known}
        for name, tensor in new.items():
            if tensor.is_meta:
                raise ModelError(
                    f"the bytes of {name} are not in memory, so the model has no fingerprint: "
                    "load the whole model, or give model_revision"
                )
        # Before the bytes are read: a change meanwhile is seen.
        looks = {name: TensorLook(tensor) for name, tensor in new.items()}
        with ThreadPoolExecutor(FINGERPRINT_THREADS, "kvtier-fingerprint") as threads:
            digests = dict(zip(new, threads.map(_digest_tensor, new.values()), strict=True))
        self._digests = known | {name: (looks[name], digest) for name, digest in digests.items()}
        whole = hashlib.sha256()
        for name, (_, digest) in sorted(self._digests.items()):
            whole.update(name.encode() + b"\0" + digest)
        return whole.hexdigest()

    def _say_nameless(self, names: set[str]) -> None:
        if names - self._said:
            logger.warning(
                "%s has parts that no other process can compare (%s): its blocks are found by no other process. Define "
                "their classes and functions in a file, or take them out",
                self._name,
                ", ".join(sorted(names)[:MAX_SHOWN_VALUES]),
            )
            self._said |= names


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A change of the model that was noticed.

    Attributes:
        look: what the model was before it was named again.
        identity: its name; None for weights that nothing names, and without tiers.
        is_other: whether its blocks are others: False for weights that were moved, or are again what they were.
        was_reset: whether the blocks of this name were forgotten earlier.
    """

    look: ModelLook
    identity: ModelIdentity | None
    is_other: bool
    was_reset: bool


class ModelFollower:
    """Notices that the model of one engine has changed, and names it again. Used from one thread.

    Args:
        namer: names it.
        look: what the model was when it was named.
        identity: its name; None without tiers, where it needs none.
    """

    def __init__(self, namer: ModelNamer, look: ModelLook, identity: ModelIdentity | None) -> None:
        self._namer = namer
        self._look = look
        self._has_tiers = identity is not None
        self._in_effect = identity
        self._reset_names: set[ModelIdentity] = set()

    def find_change(self) -> ModelChange | None:
        """Return what has changed since the last change that was accepted; None when nothing has.

        Effects: switches a model that has changed to evaluation mode.

        Raises:
            ModelError: it has an adapter now that cannot be served.
        """
        if not self._look.has_changed():
            return None
        require_served_adapters(self._namer.model)
        # An adapter that came meanwhile may be in training mode, and dropout would change its answers.
        self._namer.model.train(mode=False)
        # Taken before anything is read, and kept when all is done: an interrupt between leaves the change to be seen.
        look = ModelLook(self._namer.model, self._namer.unread)
        identity = self._name() if self._has_tiers else None
        is_other = identity is None or identity != self._in_effect
        return ModelChange(look, identity, is_other, identity in self._reset_names)

    def accept(self, change: ModelChange) -> None:
        """Take a change for what the model is now."""
        if change.is_other and self._has_tiers:
            logger.info("the model has changed: kvtier goes on with blocks of the weights that it has now")
        self._in_effect, self._look = change.identity, change.look

    def learn(self) -> None:
        """Take what has changed since the last look for the model's own doing; called where only its passes ran.

        Some models keep a table that grows with the longest sequence. Parameters are never taken for that.
        """
        if not self._look.has_changed():
            return
        names = self._look.changed_names()
        if names.isdisjoint(name for name, _ in self._namer.model.named_parameters()):
            self._namer.unread |= names
            self._look = ModelLook(self._namer.model, self._namer.unread)

    def on_reset(self) -> bool:
        """Note that the blocks of the model as it is are forgotten; return whether it has a name."""
        if self._in_effect is not None:
            self._reset_names.add(self._in_effect)
        return self._in_effect is not None

    def _name(self) -> ModelIdentity | None:
        try:
            return self._namer.name_probed()
        except ModelError as error:
            logger.warning("the model has changed, and its blocks stay in host memory alone: %s", error)
            return None


def summarize(departures: Mapping[str, Words]) -> dict[str, Words]:
    """Return a digest of what a model has that its class does not set, and some of its values for people. Pure."""
    if not departures:
        return {}
    text = json.dumps(departures, sort_keys=True)
    values: dict[str, set[str]] = {}
    for name, value in departures.items():
        attribute = name.rpartition(":")[2] or "class"
        values.setdefault(attribute, set()).add(json.dumps(value, sort_keys=True)[:MAX_SHOWN_CHARS])
    shown: dict[str, Words] = {
        attribute: list[Words](sorted(found)[:MAX_SHOWN_VALUES]) for attribute, found in values.items()
    }
    return {"digest": hashlib.sha256(text.encode()).hexdigest(), "values": shown}


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
