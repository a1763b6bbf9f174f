"""Whether an engine could start with its settings on this machine: memory, limits, versions, and every tier it names.

No engine is built: a tier is asked by the contract ``ProbedTier``, and leaves nothing behind.
"""

import importlib
import importlib.metadata
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kvtier.cli.engine_identity import KnownIdentity, check_namespaces, read_identity
from kvtier.cli.output import Check, CheckResult
from kvtier.config import EncryptionSettings, Settings, parse_encryption
from kvtier.engines.stock_settings import SPEC, check_stock_settings, names_kvtier
from kvtier.errors import ConfigError, KVTierError, MissingExtraError, PlaceError, describe_foreign
from kvtier.input_files import parse_json, read_text_file
from kvtier.quantities import size_in_words
from kvtier.redaction import shorten
from kvtier.tiering.start_checks import (
    HOST_SIZE,
    check_host_room,
    check_host_size,
    check_key_ring,
    check_place,
    check_settings,
    check_tier,
    is_own_spec,
)

EXTRA_CONFIG = "kv_connector_extra_config"
"""Where vLLM's --kv-transfer-config has kvtier's settings."""

SGLANG_KEYS = frozenset({"backend_name", "tier"})
"""What only the JSON of SGLang's --hicache-storage-backend-extra-config has."""

CONNECTOR = "KVTierConnector"
STOCK_CONNECTOR = "OffloadingConnector"
"""vLLM's own, with kvtier's tiers behind it."""

NEEDED_ROLE = "kv_both"

CUDA_DEVICE = Path("/dev/nvidiactl")
"""Is there where a driver for CUDA devices is."""

LIBRARIES = (
    "kvtier",
    "numpy",
    "torch",
    "vllm",
    "transformers",
    "obstore",
    "redis",
    "cryptography",
    "mooncake-transfer-engine",
)
"""Distributions whose versions are reported, those that are installed."""

MIN_OPEN_FILES = 1024
"""What most systems allow. The tiers of one engine use some dozens, its model and server some hundred."""

NODES = Path("/sys/devices/system/node")


def read_config(path: Path) -> Mapping[str, Any]:  # Any: JSON of the user
    """Return what a file with an engine's settings says.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    form = 'must hold an object such as {"cpu_bytes_to_use": "8GiB"}'
    found = parse_json("--config", str(path), read_text_file("--config", path), form)
    if not isinstance(found, dict):
        raise ConfigError("--config", str(path), form)
    return found


def check_config(
    config: Mapping[str, Any],
    engine: Path | None = None,
    vllm: str | None = None,
    root: Path = Path("/"),
) -> Iterator[Check]:  # Any: as above
    """Yield every check of an engine's settings on this machine.

    Args:
        config: vLLM's --kv-transfer-config, for kvtier's connector or vLLM's own, or the extra_config in it; or the
            JSON of SGLang's --hicache-storage-backend-extra-config.
        engine: the ``namespace.json`` of an engine that ran, to compare with what the tiers hold.
        vllm: arguments of vLLM, likewise.
        root: the folder that holds /proc, /sys and /dev.

    Raises:
        KVTierError: ``engine`` or ``vllm`` cannot be used.
    """
    extra = config.get(EXTRA_CONFIG)
    if config.get("kv_connector") == STOCK_CONNECTOR and isinstance(extra, dict) and names_kvtier(extra):
        yield from check_stock(extra, root)
        return
    own = find_own(config)
    if own is None:
        found = f"{shorten(config.get('kv_connector'))} is another connector: its settings are not kvtier's"
        yield Check("kv_connector", CheckResult.BROKEN, found)
        return
    if own.get("kv_role", NEEDED_ROLE) != NEEDED_ROLE:
        remedy = f"must be {NEEDED_ROLE!r}: kvtier stores and loads in every engine"
        yield Check("kv_role", CheckResult.BROKEN, f"{shorten(own['kv_role'])} {remedy}")
    yield check_versions()
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_numa(NODES, os.sched_getaffinity(0))
    extra = own.get(EXTRA_CONFIG, {} if "kv_connector" in own else own)
    extra = extra if isinstance(extra, dict) else {EXTRA_CONFIG: extra}
    is_sglang = not SGLANG_KEYS.isdisjoint(extra)
    try:
        settings = read_sglang(extra) if is_sglang else check_settings(extra)
    except KVTierError as error:
        yield Check("settings", CheckResult.BROKEN, str(error))
        return
    yield Check("settings", CheckResult.GOOD, f"{len(extra)} settings are understood")
    if is_own_spec(settings):
        yield Check("spec_name", CheckResult.NOTE, f"{settings.spec_name} reads the other settings itself")
    elif is_sglang:  # its pages stay in SGLang's own host memory, and its identity is another
        yield from check_tiers(settings)
    else:
        yield from check_host_memory(settings, root)
        known = read_identity(settings, engine, vllm, extra) if settings.secondary_tiers else None
        yield from check_tiers(settings, known)


def check_stock(extra_config: Mapping[str, Any], root: Path) -> Iterator[Check]:  # Any: as above
    """Yield the checks of vLLM's own connector with kvtier's tiers and policies behind it."""
    yield check_versions()
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_numa(NODES, os.sched_getaffinity(0))
    try:
        settings = check_stock_settings(extra_config)
    except KVTierError as error:
        yield Check("settings", CheckResult.BROKEN, str(error))
        return
    yield Check("settings", CheckResult.GOOD, f"{len(extra_config)} settings of vLLM's own connector")
    if settings.secondary_tiers and extra_config.get("spec_name") != SPEC:
        found = f"{shorten(extra_config.get('spec_name'))} knows no tiers: write {SPEC!r}"
        yield Check("spec_name", CheckResult.BROKEN, found)
    yield from check_host_memory(settings, root)
    yield from check_tiers(settings)


def check_tiers(settings: Settings, known: KnownIdentity | None = None) -> Iterator[Check]:
    """Yield the checks of the key ring and of each tier."""
    if settings.encryption is not None:
        yield check_encryption(settings.encryption)
    for number, entry in enumerate(settings.secondary_tiers):
        subject = f"tier {number} ({shorten(entry.get('type', '?')).strip(chr(39))})"
        yield from probe_tier(subject, entry, settings, known)


def read_sglang(extra_config: Mapping[str, Any]) -> Settings:  # Any: as above
    """Return what SGLang's JSON says of kvtier's tier, checked as SGLang's start does.

    Raises:
        KVTierError: it cannot work.
    """
    from kvtier.engines.sglang.settings import parse_extra_config

    found = parse_extra_config(extra_config)
    # Each rank and pool has a slab of its own; this one stands for all.
    tier = {
        name: value.replace("{rank}", "0").replace("{pool}", "kv") if isinstance(value, str) else value
        for name, value in found.tier.items()
    }
    return Settings(encryption=parse_encryption(found.encryption, os.environ), secondary_tiers=(tier,))


def find_own(config: Mapping[str, Any]) -> Mapping[str, Any] | None:  # Any: as above
    """Return the part of an engine's settings that is about kvtier's connector, None when there is none. Pure."""
    if config.get("kv_connector", CONNECTOR) == CONNECTOR:
        return config
    extra = config.get(EXTRA_CONFIG)
    several = extra.get("connectors") if isinstance(extra, dict) else None
    for one in several if isinstance(several, list) else ():
        if isinstance(one, dict) and one.get("kv_connector") == CONNECTOR:
            return one
    return None


def check_locked_memory(limit: int, num_bytes: int) -> Check:
    """Compare the limit of locked memory with what is pinned for CUDA. Pure."""
    if limit == resource.RLIM_INFINITY or limit >= num_bytes:
        return Check("locked memory", CheckResult.GOOD, "enough to pin the rows")
    remedy = "ulimit -l unlimited, or run the container with --ulimit memlock=-1"
    found = f"at most {size_in_words(limit)} of {size_in_words(num_bytes)} can be pinned: {remedy}"
    return Check("locked memory", CheckResult.NOTE, found)


def check_versions() -> Check:
    """Report the versions of the libraries that matter."""
    found = []
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return Check("versions", CheckResult.GOOD, ", ".join(found))


def check_open_files(limit: int) -> Check:
    """Compare the limit of open files with what an engine needs. Pure."""
    if limit == resource.RLIM_INFINITY:
        return Check("open files", CheckResult.GOOD, "no limit")
    if limit < MIN_OPEN_FILES:
        return Check("open files", CheckResult.NOTE, f"at most {limit}: raise it, ulimit -n {MIN_OPEN_FILES}")
    return Check("open files", CheckResult.GOOD, f"at most {limit}")


def check_numa(nodes: Path, cores: set[int]) -> Check:
    """Report whether the cores of this process are all near the same memory.

    Args:
        nodes: the kernel's folder of NUMA nodes.
        cores: those that this process may use.
    """
    used = []
    for node in sorted(nodes.glob("node[0-9]*")):
        with suppress(OSError, ValueError):
            if cores & parse_cpu_list((node / "cpulist").read_text(encoding="ascii")):
                used.append(node.name)
    if len(used) > 1:
        remedy = (
            "rows may be far from the device: numactl --cpunodebind=N --membind=N, N being the device's node"
        )
        return Check("NUMA", CheckResult.NOTE, f"cores of {len(used)} nodes: {remedy}")
    return Check("NUMA", CheckResult.GOOD, f"all cores in {used[0]}" if used else "one node")


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8". Pure.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def check_host_memory(settings: Settings, root: Path) -> Iterator[Check]:
    """Compare the primary tier with the memory there is."""
    subject, wanted = HOST_SIZE, settings.cpu_bytes_to_use
    try:
        check_host_size(settings, root=root)
        check_host_room(settings, root=root)
    except ConfigError as error:
        given = "" if wanted is None else f"{error.value} "
        yield Check(subject, CheckResult.BROKEN, f"{given}{error.remedy}")
        return
    if not isinstance(wanted, int):
        yield Check(subject, CheckResult.NOTE, '"auto": the engine works it out at its start and logs how')
        return
    yield Check(subject, CheckResult.GOOD, f"{size_in_words(wanted)} fits")
    if CUDA_DEVICE.exists():
        yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], wanted)


def check_encryption(settings: EncryptionSettings) -> Check:
    """Read the key ring as an engine would at its start."""
    try:
        ring = check_key_ring(settings)
        importlib.import_module("kvtier.tiering.kit.encryption")
    except KVTierError as error:
        return Check("encryption", CheckResult.BROKEN, str(error))
    found = f"{len(ring.entries)} entries in {settings.key_file}"
    if ring.current(None) is None:
        found += ", none of them the default: blocks of tenants without an entry are not stored"
    return Check("encryption", CheckResult.GOOD, found)


def probe_tier(
    subject: str, entry: Mapping[str, Any], settings: Settings, known: KnownIdentity | None = None
) -> Iterator[Check]:  # Any: as above
    """Yield what one tier says of its settings and of its backend, and what separates the engine from its blocks."""
    try:
        checked = check_tier(entry, settings)
        check_place(checked)
        tier_class, own = checked.tier_class, checked.own
        findings = tier_class.probe(own)
    except (MissingExtraError, PlaceError) as error:
        consequence = "refuses to start" if entry.get("required") else "starts without this tier"
        yield Check(subject, CheckResult.BROKEN, f"{error}; the engine {consequence}")
        return
    except KVTierError as error:
        yield Check(subject, CheckResult.BROKEN, str(error))
        return
    except Exception as error:  # noqa: BLE001  # foreign tier: what it raises is its answer
        yield Check(subject, CheckResult.BROKEN, f"cannot be probed: {describe_foreign(error)}")
        return
    if findings is None:
        yield Check(
            subject, CheckResult.NOTE, "its settings are understood; whether it works shows at the start"
        )
        return
    for finding in findings:
        result = CheckResult.NOTE if finding.is_note else CheckResult.GOOD
        yield Check(subject, result if finding.is_good else CheckResult.BROKEN, finding.text)
    if known is None or tier_class.place_setting is None or not all(one.is_good for one in findings):
        return
    encrypts = settings.encryption is not None and checked.settings.encryption
    # Nothing may have been stored there yet, or it cannot be listed.
    with suppress(KVTierError), closing(tier_class.open_place(own)) as place:
        yield from check_namespaces(subject, place, known, is_encrypting=encrypts)
