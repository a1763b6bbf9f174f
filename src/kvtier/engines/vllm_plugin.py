"""What vLLM calls in each of its processes once kvtier is installed: the entry point in ``vllm.general_plugins``.

It makes names enough, without a path to a module: ``"kv_connector": "KVTierConnector"``, and for vLLM's own connector
the tiers and policies of ``TIERS`` and ``POLICIES``. It keeps the configuration of an engine whose connector is being
built, because vLLM's own connector does not give it to a tier, and a tier names its blocks by it. And it has kvtier's
settings checked when vLLM makes its configuration, in the process of the API server. vLLM shows a connector its
settings only when the model has been loaded and profiled, so that a misspelled one would cost that much time. No hook
of a connector comes earlier on every platform (docs/adr/0040), so the configuration's own check is extended.

In an engine without kvtier nothing of it but this file is imported. Source: ``vllm/plugins``, ``KVConnectorFactory``,
``SecondaryTierFactory``, ``CachePolicyFactory`` and ``ProcessorInputs`` of vLLM 0.28 to 0.33.
"""

import functools
import multiprocessing
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTOR = "KVTierConnector"
CONNECTOR_PREFIX = "kvtier"
MODULE = "kvtier.engines.vllm"

SEVERAL = "MultiConnector"
"""vLLM's connector of connectors, whose settings have those of each."""

STOCK = "OffloadingConnector"
"""vLLM's own, which takes kvtier's tiers and policies by their modules or names."""

STOCK_DEFAULT_SPEC = "CPUOffloadingSpec"
"""What it builds without ``spec_name``; it knows no secondary tiers."""

TIERS = {
    "kvtier-fs": "KVTierFS",
    "kvtier-obj": "KVTierObj",
    "kvtier-valkey": "KVTierValkey",
    "kvtier-mooncake": "KVTierMooncake",
}
"""Names of kvtier's tiers for vLLM's own connector -> classes in ``kvtier.engines.vllm.tiers``."""

POLICIES = {"kvtier-lru": "KVTierLRU", "kvtier-arc": "KVTierARC", "kvtier-hazard": "KVTierHazard"}
"""Likewise of the policies -> classes in ``kvtier.engines.vllm.policies``."""

CLIENT = "client-"
"""Stands before a hash of a name that a client gave, so that it is no hash of an image."""


_engine: ContextVar[VllmConfig | None] = ContextVar("kvtier's engine", default=None)


def register() -> None:
    """Register kvtier's names, and have its settings checked with each configuration; idempotent."""
    if CONNECTOR not in KVConnectorFactory._registry:  # noqa: SLF001 - it has no public way to ask
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    register_stock_names()
    keep_configurations()
    stock = VllmConfig.__post_init__
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def check_too(self: VllmConfig) -> None:
        asked = self.kv_transfer_config
        connector, extra_config = (
            (asked.kv_connector, dict(asked.kv_connector_extra_config)) if asked else (None, {})
        )
        stock(self)
        if asked is not None and uses_kvtier(connector, extra_config):
            refuse_replaced(self, connector, extra_config)
            if connector == STOCK:
                refuse_idle_tiers(extra_config)
                check_tiers(extra_config)
        check_before_start(self)

    VllmConfig.__post_init__ = check_too


def register_stock_names() -> None:
    """Register the names of tiers and policies in vLLM's own factories; idempotent. Imports no tier and no policy."""
    try:
        from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # a release that has them elsewhere: there only a path to the module names them
        return
    for name, class_name in TIERS.items():
        if name not in SecondaryTierFactory._registry:  # noqa: SLF001 - as above
            SecondaryTierFactory.register_tier(name, f"{MODULE}.tiers", class_name)
    for name, class_name in POLICIES.items():
        if name not in CachePolicyFactory._registry:  # noqa: SLF001 - as above
            CachePolicyFactory.register_cache_policy(name, f"{MODULE}.policies", class_name)


def keep_configurations() -> None:
    """Keep the configuration of an engine while vLLM builds its connector, for ``config_of_engine``; idempotent."""
    stock = KVConnectorFactory.create_connector
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def create_connector(config: VllmConfig, *args: object, **kwargs: object) -> object:
        kept = _engine.set(config)
        try:
            return stock(config, *args, **kwargs)
        finally:
            _engine.reset(kept)

    KVConnectorFactory.create_connector = staticmethod(create_connector)


def config_of_engine() -> VllmConfig | None:
    """Return the configuration of the engine whose connector is being built here; None where none is."""
    return _engine.get()


def check_before_start(vllm_config: VllmConfig) -> None:
    """Refuse what cannot work before a model is loaded, if the engine is to use kvtier.

    Raises:
        ConfigError: a setting cannot work, or a setting of vLLM is not supported.
        UnknownNameError: an unknown setting, tier or policy.
        NamedClassError: a tier's own class cannot be imported.
        PlaceError: the path of a required tier cannot be made.
        MissingExtraError: the client library of a required tier is not installed.
    """
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None:
        return
    for extra_config in own_settings(transfer_config):
        # Imported here: in an engine that does not use kvtier none of it is.
        from kvtier.engines.vllm.config import check_supported, count_local_engines
        from kvtier.tiering.start_checks import check_start

        if transfer_config.kv_connector == CONNECTOR and vllm_config.model_config is not None:
            check_supported(vllm_config)
        check_start(
            extra_config,
            count_local_engines(vllm_config.parallel_config),
            # vLLM's own processes make configurations too, some when their engine has its memory.
            is_before_engines=multiprocessing.parent_process() is None,
        )
        if getattr(vllm_config.model_config, "multimodal_config", None) is not None:
            mark_client_names()


def mark_client_names() -> None:
    """Make the name that a client gave an image visible where vLLM hashes it; idempotent.

    With ``mm_processor_kwargs`` or ``media_io_kwargs`` vLLM hashes such a name together with them, and what comes of it
    looks as if it were the image's own hash. Only the process that gets the request knows the difference.
    """
    try:
        from vllm.multimodal.processing.inputs import ProcessorInputs
    except ImportError:  # a release that has it elsewhere, where such names stay hidden
        return
    stock = ProcessorInputs.get_mm_hashes
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def get_mm_hashes(self: ProcessorInputs, *args: object, **kwargs: object) -> dict[str, list[str]]:
        hashes: dict[str, list[str]] = stock(self, *args, **kwargs)
        for modality, names in (self.mm_uuid_items or {}).items():
            hashes[modality] = [
                made if name is None or name == made else f"{CLIENT}{made}"
                for made, name in zip(hashes.get(modality, ()), names, strict=False)
            ]
        return hashes

    ProcessorInputs.get_mm_hashes = get_mm_hashes


def uses_kvtier(connector: str | None, extra_config: Mapping[str, Any]) -> bool:  # Any: JSON of the user
    """Return whether a configuration names kvtier: its connector, or in vLLM's a tier or policy of it. Pure."""
    if connector == STOCK:
        return _names_kvtier(extra_config)
    return connector == CONNECTOR or (connector == SEVERAL and _names_kvtier(extra_config))


def refuse_replaced(
    vllm_config: VllmConfig,
    connector: str | None,
    extra_config: Mapping[str, Any],  # Any: as above
) -> None:
    """Refuse a configuration of which vLLM has replaced what its user asked for, as ``--kv-offloading-size`` does.

    Args:
        vllm_config: what vLLM has made of it.
        connector: the connector that the user has named.
        extra_config: its settings, as the user wrote them.

    Raises:
        ConfigError: it has; the message has both flags and what to write.
    """
    from kvtier.errors import ConfigError

    made, size = vllm_config.kv_transfer_config, getattr(vllm_config.cache_config, "kv_offloading_size", None)
    flag, written = (
        ("kv_offloading_size", f'"{size:g}GiB"') if size is not None else ("kv_connector", "its size")
    )
    remedy = (
        f'leave --kv-offloading-size out and write "cpu_bytes_to_use": {written} in kv_connector_extra_config'
    )
    if made.kv_connector != connector:
        value = made.kv_connector if size is None else size
        replaced = f"vLLM would replace kv_connector={connector!r} by {made.kv_connector!r}, without kvtier"
        raise ConfigError(flag, value, f"{replaced}: {remedy}")
    name = "cpu_bytes_to_use"
    now = made.kv_connector_extra_config.get(name)
    if name in extra_config and extra_config[name] != now:
        raise ConfigError(
            flag, size, f"vLLM would replace {name}={extra_config[name]!r} by {now!r}: {remedy}"
        )


def refuse_idle_tiers(extra_config: Mapping[str, Any]) -> None:  # Any: as above
    """Refuse tiers of kvtier's beside a spec of vLLM's that knows none. Pure.

    Raises:
        ConfigError: there are such; the message has both settings and what to write.
    """
    from kvtier.errors import ConfigError

    spec, tiers = extra_config.get("spec_name") or STOCK_DEFAULT_SPEC, extra_config.get("secondary_tiers")
    if spec == STOCK_DEFAULT_SPEC and _names_kvtier(tiers):
        remedy = 'leaves secondary_tiers without an effect: write "spec_name": "TieringOffloadingSpec"'
        raise ConfigError("spec_name", spec, remedy)


def check_tiers(extra_config: Mapping[str, Any]) -> None:  # Any: as above
    """Refuse tiers and policies of kvtier's that cannot work, before a model is loaded.

    Raises:
        KVTierError: one cannot.
    """
    from kvtier.engines.stock_settings import check_stock_settings

    check_stock_settings(extra_config)


def _names_kvtier(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_names_kvtier, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_names_kvtier, value))
    return isinstance(value, str) and value.lower().startswith(CONNECTOR_PREFIX)


def own_settings(transfer_config: KVTransferConfig) -> Iterator[Mapping[str, Any]]:  # Any: JSON of the user
    """Yield the settings of each ``KVTierConnector`` in a configuration, also within vLLM's MultiConnector. Pure."""
    extra_config = transfer_config.kv_connector_extra_config
    if transfer_config.kv_connector == CONNECTOR:
        yield extra_config
    elif transfer_config.kv_connector == SEVERAL:
        for one in extra_config.get("connectors", ()):
            if isinstance(one, Mapping) and one.get("kv_connector") == CONNECTOR:
                yield one.get("kv_connector_extra_config", {})
