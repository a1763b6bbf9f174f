"""The options of ``kvtier simulate``, turned into values of ``kvtier.sim``."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.option_names import naming_options
from kvtier.cli.traces import DEFAULT_DEVICE, DEFAULT_HOST
from kvtier.config import LoadIf
from kvtier.cpu.policies.registry import CACHE_POLICIES, POLICY
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.quantities import parse_bytes
from kvtier.sim.clients import ClientHints, HintNoise, Honesty
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel, KeptStates, derive_prefill_rate
from kvtier.sim.states import merge_into_pages
from kvtier.sim.sweep import Size, Sweep
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import parse_tier_settings

HINT_NOISE_FORM = "by comma wrong=0.3, silent=0.5, factor=2, random, hostile, liars=0.5, seed=1"

NOISE_FIELDS = {
    "wrong": "wrong_share",
    "silent": "silent_share",
    "factor": "time_factor",
    "liars": "liar_share",
    "seed": "seed",
}
"""Words of --hint-noise -> fields of HintNoise."""

HINTS = ("none", "continues", "returns")

TIER_FORM = (
    "NAME:CAPACITY:BANDWIDTH[:LATENCY[:STREAMS]] such as fs:4TiB:3GB/s or obj:20TiB:1GB/s,500MB/s:15ms:64"
)

DEFAULT_POLICY, DEFAULT_LOAD_IF, DEFAULT_HINTS, DEFAULT_KV_BYTES = "lru", "always", "none", "128KiB"
DEFAULT_DECODE, DEFAULT_MAX_RUNNING = 40.0, 64

DEFAULT_LATENCY_S = 100e-6
"""Seconds until the first byte of a block: that of a local NVMe disk."""

DEFAULT_NUM_STREAMS = 8
"""Concurrent transfers: the number of threads of kvtier's disk tiers."""

ENGINE_OPTIONS = {
    "max_running": "--max-running",
    "prefill_tokens_per_s": "--prefill",
    "decode_tokens_per_s": "--decode",
    "interval_tokens": "--state-interval",
}
"""Fields of an engine -> the options that set them."""

TIME_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

SWEEP_FORM = "PLACE=SIZE,SIZE,... or PLACE=FROM..TO:HOW_MANY such as host=64GiB,128GiB or fs=1TiB..16TiB:5"

MAX_SIZES = 16
"""Sizes of one sweep, at most. The page has four plots for each: with three policies and a tier it stays below two
megabytes and takes a quarter of a minute to draw."""

UNITS: Mapping[str, int] = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}

TIER_SETTING_FORM = "NAME.SETTING=VALUE such as fs.cascade=on_evict or fs.store_threshold=2"

SIMULATED_SETTINGS = (
    "admission",
    "cascade",
    "fill",
    "job_timeout_s",
    "max_in_flight_store_bytes",
    "policy",
    "store_threshold",
)
"""Fields of ``TierSettings`` that have an effect on simulated time."""

PARSED_NAMES = {
    **{
        name: name
        for name in (*SIMULATED_SETTINGS, *(f"admission.{field.name}" for field in fields(TierAdmission)))
    },
    "name in 'admission'": "admission",
}
"""Names in the production parser's errors -> the setting's name."""

Device = Annotated[
    str | None,
    typer.Option(help=f"Memory of the device cache; default: {DEFAULT_DEVICE}, less with --example."),
]
Host = Annotated[
    str | None,
    typer.Option(
        help=f"Host memory behind the device cache, 0 for none; default: {DEFAULT_HOST}, less with --example."
    ),
]
Tiers = Annotated[list[str] | None, typer.Option(help=f"A tier behind host memory, repeatable: {TIER_FORM}.")]
TierSettings = Annotated[
    list[str] | None, typer.Option(help=f"A setting of one tier, repeatable: {TIER_SETTING_FORM}.")
]
Policies = Annotated[
    str, typer.Option(help="Eviction policies of host memory, by comma; also package.module:Class.")
]
StoreThreshold = Annotated[int, typer.Option(help="Accesses before a block is stored.")]
LoadIfText = Annotated[
    str, typer.Option("--load-if", help="When to load hits of tiers: always, or if faster than computing.")
]
Hints = Annotated[
    str,
    typer.Option(help="What clients say of a prompt's future: none, continues (or ends), returns (when)."),
]
HintNoiseText = Annotated[str, typer.Option("--hint-noise", help=f"How wrong they are: {HINT_NOISE_FORM}.")]
SweepText = Annotated[
    str | None, typer.Option("--sweep", help=f"Several capacities of one place: {SWEEP_FORM}.")
]

KVBytes = Annotated[
    str,
    typer.Option("--kv-bytes-per-token", help="Size of a token's keys and values, all layers and devices."),
]
StateBytes = Annotated[
    str | None,
    typer.Option(help="Size of a recurrent state, all layers and devices; default: a model without states."),
]
StateInterval = Annotated[
    int | None,
    typer.Option(help="Tokens between kept states, and the last of a prompt; default: one each block."),
]
Prefill = Annotated[
    float | None,
    typer.Option(help="Prompt tokens computed per second; default: derived, so that prompts do not queue."),
]
Decode = Annotated[float, typer.Option(help="Tokens per second of each answer.")]
MaxRunning = Annotated[int, typer.Option(help="Requests that run at the same time.")]

Jobs = Annotated[int, typer.Option(help="Simulations at the same time, each in its own process.")]
JSONFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers as JSON; - is stdout.")]
HTMLFile = Annotated[
    Path | None, typer.Option("--html", help="Write a page with tables and plots, viewable offline.")
]


def make_host(
    policies: Sequence[str],
    num_blocks: int,
    tiers: Sequence[TierModel],
    store_threshold: int,
    load_if: LoadIf = LoadIf.ALWAYS,
) -> HostModel:
    """Return host memory with the first of the policies.

    Raises:
        UnknownNameError: a policy does not exist.
        NamedClassError: the class that a policy names cannot be used.
        ConfigError: no policy is named or one twice, or two tiers have one name.
    """
    if not policies:
        raise ConfigError("--policy", "", f"name one of {', '.join(CACHE_POLICIES.names())}")
    for policy in policies:
        require_policy("--policy", policy)
        if policies.count(policy) > 1:
            raise ConfigError("--policy", policy, "is named twice: name each policy once")
    with naming_options({"name": "--tier", "store_threshold": "--store-threshold"}):
        return HostModel(
            num_blocks, policies[0], tiers=tuple(tiers), store_threshold=store_threshold, load_if=load_if
        )


def require_policy(option: str, name: str) -> None:
    """Refuse a name that is not a policy's. A class of the user's is imported for the check.

    Raises:
        UnknownNameError: the policy does not exist.
        NamedClassError: the class that it names cannot be used.
    """
    with naming_options({POLICY: option}):
        CACHE_POLICIES.resolve(name)


def parse_load_if(text: str) -> LoadIf:
    """Return the value of ``--load-if``; its words are those of the setting ``load_if``. Pure.

    Raises:
        ConfigError: it is not one of them.
    """
    names = [choice.value for choice in LoadIf]
    if text not in names:
        raise ConfigError("--load-if", text, f"must be one of {', '.join(map(repr, names))}")
    return LoadIf(text)


def parse_hints(hints: str, noise: str) -> tuple[ClientHints, HintNoise]:
    """Return the values of ``--hints`` and ``--hint-noise``, the latter in the form HINT_NOISE_FORM. Pure.

    Raises:
        ConfigError: one is not valid.
    """
    if hints not in HINTS:
        raise ConfigError("--hints", hints, f"must be one of {', '.join(HINTS)}")
    honest = Honesty.HONEST
    values: dict[str, Any] = {}  # Any: fields of HintNoise, which are numbers here
    for part in split_names(noise):
        word, equals, text = (each.strip() for each in part.partition("="))
        if not equals and word in {Honesty.RANDOM.value, Honesty.HOSTILE.value}:
            honest = Honesty(word)
            continue
        value = parse_value(text) if word in NOISE_FIELDS else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError("--hint-noise", part, f"must be {HINT_NOISE_FORM}")
        values[word] = value
    with naming_options(dict.fromkeys(NOISE_FIELDS.values(), "--hint-noise")):
        noise_found = HintNoise(
            values.get("wrong", 0.0),
            values.get("silent", 0.0),
            values.get("factor", 1.0),
            honest,
            values.get("liars", 1.0),
            seed=int(values.get("seed", 1)),
        )
    return ClientHints(hints), noise_found


def split_names(text: str) -> list[str]:
    """Return the names between commas. Pure."""
    return [name.strip() for name in text.split(",") if name.strip()]


def host_blocks_of(size: str, block_bytes: int, tiers: Sequence[TierModel]) -> int:
    """Return the blocks of host memory; 0 for an engine without offloading.

    Raises:
        ConfigError: it is not a size, smaller than a block, or no memory with tiers behind it.
    """
    if size.strip() != "0":
        return blocks_of("--host", size, block_bytes)
    if tiers:
        remedy = (
            "is a run without offloading, and tiers are behind host memory: give it some, or leave out --tier"
        )
        raise ConfigError("--host", size, remedy)
    return 0


def blocks_of(option: str, size: str, block_bytes: int) -> int:
    """Return how many whole blocks fit into a size such as ``"64GiB"``.

    Raises:
        ConfigError: it is not a size, or smaller than a block.
    """
    num_blocks = parse_bytes(option, size) // block_bytes
    if num_blocks < 1:
        meant = f', or did you mean "{size.strip()}GiB"?' if size.strip().isdigit() else ""
        remedy = f"is smaller than a block of the trace ({block_bytes} bytes): give at least that much{meant}"
        raise ConfigError(option, size, remedy)
    return num_blocks


def page_trace(trace: Trace, kv_size: str, state_size: str | None, state_interval: int | None) -> Trace:
    """Return ``trace`` in the blocks of an engine: its own, or as long as a state where the model keeps states.

    Raises:
        ConfigError: a size is not valid.
    """
    if state_size is None:
        return trace
    kv_bytes, state_bytes = (
        parse_bytes("--kv-bytes-per-token", kv_size),
        parse_bytes("--state-bytes", state_size),
    )
    return merge_into_pages(trace, kv_bytes, state_bytes, state_interval)


def make_engine(
    trace: Trace,
    *,
    device: str,
    kv_size: str,
    max_running: int,
    prefill: float | None,
    decode: float,
    state_size: str | None = None,
    state_interval: int | None = None,
) -> EngineModel:
    """Return the engine, with blocks of the trace's length; without ``prefill``, of a rate derived from the trace.

    With a size of states a block is a page, which holds keys and values or a state, whichever is longer.

    Raises:
        ConfigError: a value is not valid.
    """
    block_bytes = trace.block_tokens * parse_bytes("--kv-bytes-per-token", kv_size)
    states = None
    if state_size is not None:
        block_bytes = max(block_bytes, parse_bytes("--state-bytes", state_size))
        states = KeptStates(state_interval)
    elif state_interval is not None:
        raise ConfigError("--state-interval", state_interval, "needs --state-bytes, the size of a state")
    num_blocks = blocks_of("--device", device, block_bytes)
    with naming_options(ENGINE_OPTIONS):
        rate = derive_prefill_rate(trace) if prefill is None else prefill
        return EngineModel(
            trace.block_tokens, block_bytes, num_blocks, max_running, rate, decode, states=states
        )


def parse_tier(text: str, block_bytes: int) -> TierModel:
    """Return the tier that ``text`` describes in the form TIER_FORM.

    Raises:
        ConfigError: it does not have that form, or a value is not valid.
    """
    name, *values = (part.strip() for part in text.split(":"))
    if not name or not 2 <= len(values) <= 4:
        raise ConfigError("--tier", text, f"must be {TIER_FORM}")
    capacity, bandwidths, latency, streams = (*values, "", "")[:4]
    read, _, write = bandwidths.partition(",")
    if streams and not re.fullmatch(r"0*[1-9][0-9]*", streams):
        raise ConfigError("--tier", text, f"STREAMS must be an integer from 1: {TIER_FORM}")
    speed = LinkSpeed(
        _parse_bandwidth(text, read),
        _parse_bandwidth(text, write or read),
        _parse_seconds(text, latency) if latency else DEFAULT_LATENCY_S,
        int(streams) if streams else DEFAULT_NUM_STREAMS,
    )
    with naming_options({"name": "--tier"}):
        return TierModel(name, blocks_of("--tier", capacity, block_bytes), speed)


def parse_sweep(text: str, block_bytes: int) -> Sweep:
    """Return the sweep that ``text`` describes in the form SWEEP_FORM, with its sizes in ascending order.

    Raises:
        ConfigError: it does not have that form, a size holds no block, or two sizes hold the same number of blocks.
    """
    place, equals, sizes = (part.strip() for part in text.partition("="))
    if not place or not equals or not sizes:
        raise ConfigError("--sweep", text, f"must be {SWEEP_FORM}")
    labels = _spread_range(text, sizes) if ".." in sizes else [part.strip() for part in sizes.split(",")]
    if len(labels) > MAX_SIZES:
        raise ConfigError("--sweep", text, f"has {len(labels)} sizes: give at most {MAX_SIZES}")
    found = sorted(
        (Size(blocks_of("--sweep", label, block_bytes), label) for label in labels),
        key=lambda size: size.num_blocks,
    )
    for smaller, size in pairwise(found):
        if size.num_blocks == smaller.num_blocks:
            remedy = (
                f"{smaller.label} and {size.label} both hold {size.num_blocks} blocks: give sizes that differ"
            )
            raise ConfigError("--sweep", text, remedy)
    return Sweep(place, tuple(found))


def format_size(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit, to four digits, such as "1.5GiB". Pure."""
    for unit, unit_bytes in UNITS.items():
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.4g}{unit}"
    return f"{num_bytes:.4g}"


def apply_tier_settings(
    tiers: Sequence[TierModel], texts: Iterable[str], block_bytes: int
) -> list[TierModel]:
    """Return ``tiers`` with the settings of ``texts``, each in the form TIER_SETTING_FORM. Pure.

    Raises:
        ConfigError: the form or a value is not valid, or a setting is given twice.
        UnknownNameError: a tier, setting or policy does not exist.
        NamedClassError: the class that a policy names cannot be used.
    """
    values: dict[str, dict[str, Any]] = {tier.name: {} for tier in tiers}  # Any: the parser gives them types
    for text in texts:
        place, equals, value = text.partition("=")
        name, dot, setting = (part.strip() for part in place.partition("."))
        if not equals or not dot:
            raise ConfigError("--tier-setting", text, f"must be {TIER_SETTING_FORM}")
        if name not in values:
            raise UnknownNameError("tier for --tier-setting", name, values)
        if setting not in SIMULATED_SETTINGS:
            raise UnknownNameError("simulated setting for --tier-setting", setting, SIMULATED_SETTINGS)
        if setting in values[name]:
            raise ConfigError("--tier-setting", text, f"{name}.{setting} is given twice: give it once")
        values[name][setting] = parse_value(value.strip())
    return [_apply(tier, values[tier.name], block_bytes) for tier in tiers]


def parse_value(text: str) -> object:
    """Return the JSON value of ``text``, or the text itself if it is not JSON. Pure."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_bandwidth(text: str, value: str) -> float:
    amount, slash, second = value.partition("/")
    if not slash or second != "s":
        raise ConfigError("--tier", text, f"BANDWIDTH must end in /s: {TIER_FORM}")
    return float(parse_bytes("--tier", amount))


def _parse_seconds(text: str, value: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", value)
    if found is None:
        raise ConfigError("--tier", text, f"LATENCY must be a number with us, ms or s: {TIER_FORM}")
    return float(found[1]) * TIME_UNITS_S[found[2]]


def _spread_range(text: str, sizes: str) -> list[str]:
    """Return sizes with equal ratios between them, from the first to the last."""
    found = re.fullmatch(r"(.+?)\.\.(.+?):([0-9]+)", sizes)
    if found is None:
        raise ConfigError("--sweep", text, f"must be {SWEEP_FORM}")
    first, last, num = parse_bytes("--sweep", found[1]), parse_bytes("--sweep", found[2]), int(found[3])
    if not 2 <= num <= MAX_SIZES or first >= last:
        raise ConfigError("--sweep", text, f"a range must ascend and have from 2 to {MAX_SIZES} sizes")
    return [format_size(first * (last / first) ** (part / (num - 1))) for part in range(num)]


def _apply(tier: TierModel, values: dict[str, Any], block_bytes: int) -> TierModel:  # Any: as above
    option = f"--tier-setting {tier.name}."
    with naming_options({parsed: option + name for parsed, name in PARSED_NAMES.items()}):
        settings = parse_tier_settings(values)
    policy = settings.policy or tier.cache_policy
    require_policy(f"{option}policy", policy)
    if settings.max_in_flight_store_bytes is not None:
        # A simulated block has one byte.
        num_blocks = max(1, settings.max_in_flight_store_bytes // block_bytes)
        settings = replace(settings, max_in_flight_store_bytes=num_blocks)
    return replace(tier, cache_policy=policy, settings=settings)
