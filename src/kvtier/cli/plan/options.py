"""The options of ``kvtier plan``, turned into a ``PlanRequest``."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kvtier.cli.option_names import naming_options
from kvtier.cli.simulate.options import TIME_UNITS_S, make_engine, page_trace, require_policy
from kvtier.errors import ConfigError
from kvtier.planning.known_models import find_model
from kvtier.planning.model_shape import ModelShape, read_shape, shape_of_bytes, shape_of_dimensions
from kvtier.planning.plan import PlanRequest
from kvtier.planning.planner import Row, make_row
from kvtier.planning.prices import HOST, Medium, PriceList
from kvtier.planning.state_shape import StateLayers
from kvtier.planning.tier_mix import Goal
from kvtier.quantities import parse_bytes
from kvtier.sim.states import list_pages
from kvtier.sim.trace import Trace

DEFAULT_DTYPE = "bfloat16"
"""The type of nearly every model released since 2023."""

MAX_TIERS = 3
"""Tiers behind host memory. Each additional tier multiplies the number of mixes by a dozen."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Description of the model, in one of four ways."""

    name: str | None
    config: Path | None
    layers: int | None
    kv_heads: int | None
    head_size: int | None
    dtype: str | None
    kv_dtype: str | None
    kv_bytes: str | None
    state_bytes: str | None = None
    state_interval: int | None = None
    tensor_parallel_size: int = 1

    @property
    def is_given(self) -> bool:
        """Whether anything about the model was given, beside its workers."""
        described = (each.name for each in fields(self) if each.name != "tensor_parallel_size")
        return any(getattr(self, name) is not None for name in described)

    def shape(self) -> ModelShape:
        """Return the size of the model's keys and values, and of its states.

        Raises:
            ConfigError: the model is described in no way or in two, or a value is not valid.
        """
        shape = self._read_shape()
        if self.state_bytes is not None:
            if shape.states is not None:
                remedy = f"the model's configuration says {shape.state_bytes} bytes: leave it out"
                raise ConfigError("--state-bytes", self.state_bytes, remedy)
            num_bytes = parse_bytes("--state-bytes", self.state_bytes)
            as_long = -(-num_bytes // max(1, shape.attention_bytes_per_token))
            shape = replace(shape, states=StateLayers(1, num_bytes, as_long))
        if self.state_interval is not None:
            shape = shape.with_state_interval(self.state_interval)
        return self._divide(shape)

    def _divide(self, shape: ModelShape) -> ModelShape:
        """Return what all tensor-parallel workers store together."""
        num_workers = self.tensor_parallel_size
        if num_workers == 1:
            return shape
        if self.kv_bytes is not None:
            remedy = (
                "goes with a model whose KV heads are known: --kv-bytes-per-token is what all workers store"
            )
            raise ConfigError("--tp", num_workers, remedy)
        stored = shape.with_workers(num_workers)
        if stored.layers == shape.layers:
            said = f"what several of {num_workers} workers hold is stored once, as under vLLM"
        else:
            said = f"each of {num_workers} workers stores the KV heads that it holds, copies included"
        return replace(stored, assumptions=(*stored.assumptions, said))

    def _read_shape(self) -> ModelShape:
        dimensions = {"--layers": self.layers, "--kv-heads": self.kv_heads, "--head-size": self.head_size}
        given = [option for option, value in dimensions.items() if value is not None]
        ways = [self.name is not None, self.config is not None, bool(given), self.kv_bytes is not None]
        if sum(ways) != 1:
            remedy = (
                "describe the model by one of --model NAME, --config FILE, --layers with --kv-heads and --head-size, "
                "or --kv-bytes-per-token"
            )
            raise ConfigError("--config", self.config and str(self.config), remedy)
        if self.dtype is not None and not given:
            remedy = "goes with --layers: use --kv-dtype to set the type of keys and values"
            raise ConfigError("--dtype", self.dtype, remedy)
        if self.name is not None:
            with naming_options({"MODEL": "--model"}):
                return find_model(self.name, self.kv_dtype).shape
        if self.config is not None:
            return read_shape(self.config, self.kv_dtype)
        if self.kv_bytes is not None:
            return shape_of_bytes(parse_bytes("--kv-bytes-per-token", self.kv_bytes))
        if self.layers is None or self.kv_heads is None or self.head_size is None:
            missing = ", ".join(dimensions.keys() - given)
            raise ConfigError(missing, None, "is missing: give --layers, --kv-heads and --head-size together")
        dtype = self.kv_dtype or self.dtype or DEFAULT_DTYPE
        with naming_options({"--dtype": "--kv-dtype" if self.kv_dtype else "--dtype"}):
            return shape_of_dimensions(self.layers, self.kv_heads, self.head_size, dtype)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine that serves the trace."""

    device: str
    prefill: float | None
    decode: float
    max_running: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What may be bought, and the goal."""

    policy: str
    hit_ratio: float | None
    ttft_p90: str | None
    media: str | None
    max_tiers: int
    host_max: str | None
    max_shown: int


def make_plan_request(
    trace: Trace, model: ModelOptions, serving: EngineOptions, wanted: SearchOptions, prices: PriceList
) -> PlanRequest:
    """Return the request that all options together make.

    Raises:
        ConfigError: a value is not valid.
        UnknownNameError: the policy or medium does not exist.
        NamedClassError: the class that the policy names cannot be used.
    """
    require_policy("--policy", wanted.policy)
    if not 0 <= wanted.max_tiers <= MAX_TIERS:
        raise ConfigError("--max-tiers", wanted.max_tiers, f"must be from 0 to {MAX_TIERS}")
    for option, value in (("--gpus", serving.num_gpus), ("--show", wanted.max_shown)):
        if value < 1:
            raise ConfigError(option, value, "must be at least 1")
    shape = model.shape()
    kv_size = str(max(1, shape.attention_bytes_per_token))  # a model of states alone has pages of these
    state_size = str(shape.state_bytes) if shape.states else None
    interval = choose_interval(shape, model.state_interval, trace.block_tokens)
    trace = page_trace(trace, kv_size, state_size, interval)
    engine = make_engine(
        trace,
        device=serving.device,
        kv_size=kv_size,
        max_running=serving.max_running,
        prefill=serving.prefill,
        decode=serving.decode,
        state_size=state_size,
        state_interval=interval,
    )
    num_pages = list_pages(trace, engine.states).num_unique_blocks
    names = (
        None if wanted.media is None else [name.strip() for name in wanted.media.split(",") if name.strip()]
    )
    host_max = None if wanted.host_max is None else parse_bytes("--host-max", wanted.host_max)

    def row(medium: Medium, max_bytes: int | None = None) -> Row:
        with naming_options({} if max_bytes is None else {f"capacity of {medium.name}": "--host-max"}):
            return make_row(medium, num_pages, engine.block_bytes, max_bytes)

    return PlanRequest(
        trace,
        shape,
        engine,
        prices,
        row(prices.media[HOST], host_max),
        tuple(row(medium) for medium in prices.choose(names)),
        wanted.policy,
        make_goal(wanted.hit_ratio, wanted.ttft_p90),
        wanted.max_tiers,
        serving.num_gpus,
        wanted.max_shown,
    )


def choose_interval(shape: ModelShape, wanted: int | None, block_tokens: int) -> int | None:
    """Return the tokens between kept states; None: a state after each block, which is as long as one. Pure.

    A model without attention has no keys and values that say how long a block is: its own interval does, in whole
    blocks of the trace.
    """
    if wanted is not None or shape.states is None or shape.attention_bytes_per_token:
        return wanted
    return -(-shape.states.interval_tokens // block_tokens) * block_tokens


def make_goal(hit_ratio: float | None, ttft_p90: str | None) -> Goal | None:
    """Return the goal; None without one.

    Raises:
        ConfigError: the goal cannot be reached by any mix.
    """
    if hit_ratio is None and ttft_p90 is None:
        return None
    return Goal(hit_ratio, None if ttft_p90 is None else parse_seconds("--ttft-p90", ttft_p90))


def parse_seconds(option: str, text: str) -> float:
    """Return a time such as "2s" or "500ms" in seconds; without a unit it is seconds. Pure.

    Raises:
        ConfigError: it is not a time.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s)?", text.strip())
    if found is None:
        raise ConfigError(option, text, "must be a number with us, ms or s, such as 2s")
    return float(found[1]) * TIME_UNITS_S[found[2] or "s"]
