"""The simulated system as values: an engine, the host memory beside it, and the tiers behind that."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil, floor, log10

from kvtier.config import DEFAULT_LOOKUP_DEADLINE_S, DEFAULT_MAX_TRACKER_SIZE, LoadIf
from kvtier.errors import ConfigError
from kvtier.sim.clients import EXACT, ClientHints, HintNoise
from kvtier.sim.link import LinkSpeed
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest

PCIE_BYTES_PER_S = 25e9
"""Bytes per second between device and pinned host memory over 16 lanes of PCIe 4, without protocol overhead."""

RESERVED_NAMES = ("CPU", "device", "computed", "host")
"""Other origins of tokens in a result, and the connector's name of host memory."""


DEFAULT_PREFILL_TOKENS_PER_S = 20_000.0
"""Prompt tokens per second where nothing is known: about one large GPU with a model of 8 billion weights."""

BUSY_SHARE = 0.7
"""Share of the busiest stretch in which an engine of the derived rate computes. With more, requests queue for each
other and times describe the queue; with less, the hardware is larger than the traffic needs."""

BUSY_STRETCH_S = 300.0
"""Seconds over which a stretch is averaged. Shorter ones are bursts that a queue absorbs; longer ones hide rushes."""


@dataclass(frozen=True, slots=True)
class KeptStates:
    """At which ends of a prompt's blocks an engine keeps the recurrent states.

    Attributes:
        interval_tokens: after each multiple of so many tokens; None: after each block.
        keeps_last: also after the last whole block before the prompt's last token, as vLLM does.
    """

    interval_tokens: int | None = None
    keeps_last: bool = True


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A serving engine with continuous batching.

    Attributes:
        block_tokens: tokens of a device block; the trace's block size.
        block_bytes: bytes of keys and values of a block, all layers and workers together; with states of a page, which
            holds such a block or a state.
        num_device_blocks: blocks of the device cache.
        max_running: requests that hold device blocks at the same time.
        prefill_tokens_per_s: prompt tokens computed per second, all requests together.
        decode_tokens_per_s: tokens that each running request generates per second.
        max_step_tokens: prompt tokens computed in one step; longer prompts take several.
        is_last_block_computed: whether the last block of a prompt of whole blocks that the device holds is computed
            again, as in vLLM; otherwise only its last token is, as in the embedded engine.
        states: where the model's recurrent states are kept; None: it has none.

    Raises:
        ConfigError: one of the numbers is not above zero, or states are kept within blocks.
    """

    block_tokens: int
    block_bytes: int
    num_device_blocks: int
    max_running: int = 64
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    decode_tokens_per_s: float = 40.0
    max_step_tokens: int = 8192
    is_last_block_computed: bool = True
    states: KeptStates | None = None

    def __post_init__(self) -> None:
        for name in set(self.__dataclass_fields__) - {"is_last_block_computed", "states"}:
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a finite number above zero")
        interval = None if self.states is None else self.states.interval_tokens
        if interval is not None and (interval < 1 or interval % self.block_tokens):
            remedy = f"must be a multiple of a block, which has {self.block_tokens} tokens in this trace"
            raise ConfigError("interval_tokens", interval, remedy)


@dataclass(frozen=True, slots=True)
class HostModel:
    """The primary tier and the chain behind it.

    Attributes:
        num_blocks: blocks of host memory; 0: the engine has none.
        cache_policy: registered name of its eviction policy.
        speed: the link to the device; each direction has its own.
        tiers: the secondary tiers, in the order of lookups.
        store_threshold: accesses of a key before it is stored; below 2 every key is.
        max_tracker_size: keys whose accesses the reuse filter counts.
        lookup_deadline_s: seconds a request may wait for promotions.
        load_if: whether to load a hit that would be faster to compute.
        client_hints: which hints clients send with their requests.
        hint_noise: how wrong they are.

    Raises:
        ConfigError: two tiers have the same name or a reserved one, or the threshold is negative.
    """

    num_blocks: int
    cache_policy: str = "lru"
    speed: LinkSpeed = field(
        default_factory=lambda: LinkSpeed(PCIE_BYTES_PER_S, PCIE_BYTES_PER_S, latency_s=20e-6)
    )
    tiers: tuple[TierModel, ...] = ()
    store_threshold: int = 0
    max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE
    lookup_deadline_s: float = DEFAULT_LOOKUP_DEADLINE_S
    load_if: LoadIf = LoadIf.ALWAYS
    client_hints: ClientHints = ClientHints.NONE
    hint_noise: HintNoise = EXACT

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        for name in names:
            if names.count(name) > 1 or name in RESERVED_NAMES:
                remedy = f"each tier of a chain needs its own name, none of {', '.join(RESERVED_NAMES)}"
                raise ConfigError("name", name, remedy)
        if self.store_threshold < 0:
            raise ConfigError("store_threshold", self.store_threshold, "must be an integer from 0")


def derive_prefill_rate(trace: Trace) -> float:
    """Return a rate of computing prompts at which an engine without any cache is not saturated by ``trace``. Pure.

    It computes the prompts of the busiest stretch in ``BUSY_SHARE`` of the time, and is at least
    ``DEFAULT_PREFILL_TOKENS_PER_S``.

    Returns:
        Prompt tokens per second, rounded up to two digits.
    """
    window: deque[TraceRequest] = deque()
    num_tokens = most_tokens = 0
    for request in trace.requests:
        window.append(request)
        num_tokens += request.num_prompt_tokens
        while request.arrival_s - window[0].arrival_s > BUSY_STRETCH_S:
            num_tokens -= window.popleft().num_prompt_tokens
        most_tokens = max(most_tokens, num_tokens)
    needed = most_tokens / BUSY_STRETCH_S / BUSY_SHARE
    if needed <= DEFAULT_PREFILL_TOKENS_PER_S:
        return DEFAULT_PREFILL_TOKENS_PER_S
    step = 10.0 ** (floor(log10(needed)) - 1)
    return ceil(needed / step) * step
