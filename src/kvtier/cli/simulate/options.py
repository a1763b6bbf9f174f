"""What a user of ``kvtier simulate`` asked for, as values of ``kvtier.sim``. It runs nothing."""

import re
from collections.abc import Sequence

from kvtier.cli.option_names import said_of
from kvtier.config import LoadIf, parse_bytes
from kvtier.cpu.policies.registry import CACHE_POLICIES
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, make_trace

TIER_FORM = (
    "NAME:CAPACITY:BANDWIDTH[:LATENCY[:STREAMS]] such as fs:4TiB:3GB/s or obj:20TiB:1GB/s,500MB/s:15ms:64"
)

DEFAULT_LATENCY_S = 100e-6
"""Seconds until the first byte of a block: about that of a local NVMe disk."""

DEFAULT_NUM_STREAMS = 8
"""Blocks on their way at the same time: what kvtier's disk tiers have threads for."""

ENGINE_OPTIONS = {
    "max_running": "--max-running",
    "prefill_tokens_per_s": "--prefill",
    "decode_tokens_per_s": "--decode",
}
"""Fields of an engine, by the options that fill them."""

TRACE_OPTIONS = {"trace format": "--format"}
"""What reading a trace may not know, by the option that names it."""

TIME_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def make_host(
    policies: Sequence[str],
    num_blocks: int,
    tiers: Sequence[TierModel],
    store_threshold: int,
    load_if: LoadIf = LoadIf.ALWAYS,
) -> HostModel:
    """Return host memory, under the first of the policies.

    Raises:
        UnknownNameError: there is no such policy.
        ConfigError: no policy is named or one twice, or two tiers have one name.
    """
    if not policies:
        raise ConfigError("--policy", "", f"name one of {', '.join(CACHE_POLICIES.names())}")
    for policy in policies:
        if policy not in CACHE_POLICIES:
            raise UnknownNameError("eviction policy for --policy", policy, CACHE_POLICIES.names())
        if policies.count(policy) > 1:
            raise ConfigError("--policy", policy, "is named twice: name each policy once")
    with said_of({"name": "--tier", "store_threshold": "--store-threshold"}):
        return HostModel(
            num_blocks, policies[0], tiers=tuple(tiers), store_threshold=store_threshold, load_if=load_if
        )


def parse_load_if(text: str) -> LoadIf:
    """Return what ``--load-if`` names, as the setting of that name does. Pure.

    Raises:
        ConfigError: it names nothing.
    """
    names = [choice.value for choice in LoadIf]
    if text not in names:
        raise ConfigError("--load-if", text, f"must be one of {', '.join(map(repr, names))}")
    return LoadIf(text)


def split_names(text: str) -> list[str]:
    """Return the names between commas. Pure."""
    return [name.strip() for name in text.split(",") if name.strip()]


def blocks_of(option: str, size: str, block_bytes: int) -> int:
    """Return how many whole blocks fit into a size such as ``"64GiB"``.

    Raises:
        ConfigError: it is no size, or no block fits.
    """
    num_blocks = parse_bytes(option, size) // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            option, size, f"a block of the trace has {block_bytes} bytes: give at least that much"
        )
    return num_blocks


def make_engine(
    trace: Trace, *, device: str, kv_size: str, max_running: int, prefill: float, decode: float
) -> EngineModel:
    """Return the engine, its blocks as long as the trace's.

    Raises:
        ConfigError: a value that cannot work.
    """
    block_bytes = trace.block_tokens * parse_bytes("--kv-bytes-per-token", kv_size)
    num_blocks = blocks_of("--device", device, block_bytes)
    with said_of(ENGINE_OPTIONS):
        return EngineModel(trace.block_tokens, block_bytes, num_blocks, max_running, prefill, decode)


def parse_tier(text: str, block_bytes: int) -> TierModel:
    """Return the tier that ``text`` describes, see TIER_FORM.

    Raises:
        ConfigError: it does not have that form, or a value cannot work.
    """
    name, *values = (part.strip() for part in text.split(":"))
    if not name or not 2 <= len(values) <= 4:
        raise ConfigError("--tier", text, f"must be {TIER_FORM}")
    capacity, bandwidths, latency, streams = (*values, "", "")[:4]
    read, _, write = bandwidths.partition(",")
    if streams and not re.fullmatch(r"0*[1-9][0-9]*", streams):
        raise ConfigError("--tier", text, f"STREAMS must be a whole number from 1: {TIER_FORM}")
    speed = LinkSpeed(
        _parse_bandwidth(text, read),
        _parse_bandwidth(text, write or read),
        _parse_seconds(text, latency) if latency else DEFAULT_LATENCY_S,
        int(streams) if streams else DEFAULT_NUM_STREAMS,
    )
    with said_of({"name": "--tier"}):
        return TierModel(name, blocks_of("--tier", capacity, block_bytes), speed)


def take_first(trace: Trace, num_requests: int | None) -> Trace:
    """Return the first requests of ``trace``; all of them for None. Pure.

    Raises:
        ConfigError: fewer than one.
    """
    if num_requests is None:
        return trace
    if num_requests < 1:
        raise ConfigError("--requests", num_requests, "must be at least 1")
    return make_trace(trace.requests[:num_requests], trace.block_tokens)


def _parse_bandwidth(text: str, value: str) -> float:
    amount, slash, second = value.partition("/")
    if not slash or second != "s":
        raise ConfigError("--tier", text, f"a bandwidth ends in /s: {TIER_FORM}")
    return float(parse_bytes("--tier", amount))


def _parse_seconds(text: str, value: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", value)
    if found is None:
        raise ConfigError("--tier", text, f"a latency is a number with us, ms or s: {TIER_FORM}")
    return float(found[1]) * TIME_UNITS_S[found[2]]
