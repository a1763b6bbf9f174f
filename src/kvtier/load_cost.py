"""What loading a prefix costs in seconds, what computing it costs, and from which length on loading is faster.

It measures nothing and decides nothing: whoever has rates, measured or promised, asks it. The model: a block comes over
one link after the other, from its tier to host memory and from there to the device, and each link takes a latency once
and then moves bytes at a constant rate. A token costs the same wherever it stands, plus something for each token it
attends to. So computing a prefix is a convex function of its length and loading it a straight line: they cross once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError

MAX_TOKENS = 2**40
"""Lengths beyond it are "never": no context is as long, and a sum of so many tokens is still exact in a float."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How long a link takes for one load, with whatever else it does at the same time already taken off.

    Attributes:
        bytes_per_s: bytes of one load in a second once they flow, all streams of the link together.
        latency_s: seconds until they flow, once for a load of any size; 0 when parts follow each other without a pause.

    Raises:
        ConfigError: the rate is not a finite number above zero, or the latency not one from zero.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError("bytes_per_s", self.bytes_per_s, "a rate is a finite number above zero")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError("latency_s", self.latency_s, "a latency is a finite number from zero")

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds that a load of ``num_bytes`` takes; nothing takes none. Pure."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """How long computing a token of a prompt takes.

    Attributes:
        token_s: seconds for a token itself: 1 / (tokens in a second).
        attended_token_s: seconds more for each token that it attends to, itself included; 0 when that is not known.

    Raises:
        ConfigError: one of them is not a finite number from zero, or both are zero.
    """

    token_s: float
    attended_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("token_s", "attended_token_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "a time is a finite number from zero")
        if self.token_s == self.attended_token_s == 0:
            raise ConfigError("token_s", self.token_s, "computing takes time: give a number above zero")


def make_link_rate(
    bytes_per_s: float, latency_s: float, *, part_bytes: int, num_streams: int = 1
) -> LinkRate:
    """Return the rate of a link that moves parts, each after a latency, several at the same time. Pure.

    One stream waits out the latency for each part; enough streams hide it behind the bytes of the others. What is
    returned is right for one part and for very many; between them it is off by less than one part.

    Args:
        bytes_per_s: bandwidth of all streams together.
        latency_s: seconds before the first byte of a part.
        part_bytes: bytes of a part, which is a block.
        num_streams: parts under way at the same time.

    Raises:
        ConfigError: a value is not above zero, the latency negative.
    """
    for name, value in (("part_bytes", part_bytes), ("num_streams", num_streams)):
        if value < 1:
            raise ConfigError(name, value, "must be a whole number from 1")
    link = LinkRate(bytes_per_s, latency_s)
    part_s = link.time_s(part_bytes)
    sustained_bytes_per_s = min(bytes_per_s, num_streams * part_bytes / part_s)
    return LinkRate(sustained_bytes_per_s, max(0.0, part_s - part_bytes / sustained_bytes_per_s))


def load_s(num_bytes: float, links: Sequence[LinkRate]) -> float:
    """Return the seconds that ``num_bytes`` take over ``links``, one after the other. Pure.

    The links do not overlap: a promotion has ended before the load to the device begins.

    Args:
        num_bytes: bytes of keys and values; 0 takes no time.
        links: from the tier to the device, for example (disk, PCIe).
    """
    return sum(link.time_s(num_bytes) for link in links)


def compute_s(first_token: int, end_token: int, rate: PrefillRate) -> float:
    """Return the seconds that computing the tokens of a prompt in between takes. Pure.

    Args:
        first_token: position of the first of them: so many tokens are there already and are attended to.
        end_token: position behind the last; not above ``first_token`` means nothing to compute.
        rate: how fast the engine is.
    """
    if end_token <= first_token:
        return 0.0
    attended = (end_token * (end_token + 1) - first_token * (first_token + 1)) // 2
    return (end_token - first_token) * rate.token_s + attended * rate.attended_token_s


def break_even_tokens(
    bytes_per_token: float, links: Sequence[LinkRate], rate: PrefillRate, *, first_token: int = 0
) -> int | None:
    """Return the length beyond which a prefix is loaded faster than computed. Pure.

    Args:
        bytes_per_token: bytes of keys and values of a token, all layers and workers together.
        links: what it comes over.
        rate: how fast it is computed.
        first_token: tokens in front of it that the device has.

    Returns:
        Loading more tokens than this is faster, loading as many or fewer is not. 0: loading is faster at any length.
        None: at no length.

    Raises:
        ConfigError: a token has no bytes, or the position is negative.
    """
    if not 0 < bytes_per_token < math.inf:
        raise ConfigError(
            "bytes_per_token", bytes_per_token, "a token has a finite number of bytes above zero"
        )
    if first_token < 0:
        raise ConfigError("first_token", first_token, "a position counts from zero")

    def is_load_faster(num_tokens: int) -> bool:
        loading_s = load_s(num_tokens * bytes_per_token, links)
        return loading_s < compute_s(first_token, first_token + num_tokens, rate)

    # Once it is faster it stays so, for the difference is convex and not above zero where it begins.
    slower, faster = 0, 1
    while not is_load_faster(faster):
        if faster >= MAX_TOKENS:
            return None
        slower, faster = faster, faster * 2
    while faster - slower > 1:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if is_load_faster(middle) else (middle, faster)
    return slower
