"""Made-up traffic, from a seed, for those who have no trace yet and for tests of what recorded traces do not show.

Chats go on after a person has read and typed. Agents go on after a tool has run, seconds later, with prompts that grow
long. Jobs come back after their period with the same documents and another question. Equal seeds give equal traces on
every machine. The traffic is plausible, not measured: do not quote its hit ratios as production numbers.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

from kvtier.errors import ConfigError
from kvtier.sim.trace import StopReason, Trace, TraceRequest, make_trace

BLOCK_TOKENS = 512

HOUR_S = 3_600.0

MAX_HOURS = 24.0
"""The longest traffic that is made; a day has some hundred thousand requests, which take some hundred megabytes."""

CHATS_PER_H = 700

CHAT_BLOCKS = 35.0
"""Blocks that all turns of a chat name, on average, repeats included."""

AGENTS_PER_H = 60

MAX_AGENT_TOKENS = 120_000
"""Prompt tokens at which an agent's session ends, as its context is full."""

TOOLS_S = (0.8, 3.0, 12.0, 45.0)
"""Median durations of an agent's tools: a look into a file, a search, a test, a build."""

MAX_SCALE = 100.0
"""The busiest traffic of chats beside jobs; three hours of it have half a million requests and 900,000 blocks."""

JOB_PERIODS_S = (900.0, 3_600.0)
"""Shortest and longest time after which a job comes back."""

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class JobMix:
    """Chats and jobs of one trace, as a seed draws them.

    Attributes:
        chats_per_h: chats that begin in an hour.
        periods_s: of each job, the time after which it comes back.
        num_documents: of each job, the prompts that it sends each time.
        document_tokens: of each job, the length of such a prompt without its question.
    """

    chats_per_h: int
    periods_s: tuple[float, ...]
    num_documents: tuple[int, ...]
    document_tokens: tuple[int, ...]


def make_chat(seed: int, duration_s: float = HOUR_S) -> Trace:
    """Return chats of many people with a few applications. Pure.

    Args:
        seed: any integer.
        duration_s: time in which they begin; an hour has about 3,000 requests.

    Raises:
        ConfigError: ``duration_s`` is not above zero or longer than a day.
    """
    traffic = _begin(seed, duration_s)
    traffic.add_chats(round(CHATS_PER_H * duration_s / HOUR_S), _make_apps(traffic))
    return traffic.finish()


def make_agents(seed: int, duration_s: float = HOUR_S) -> Trace:
    """Return sessions of agents that call tools; each request says why its turn ended. Pure.

    Args:
        seed: any integer.
        duration_s: time in which they begin; an hour has about 3,000 requests.

    Raises:
        ConfigError: ``duration_s`` is not above zero or longer than a day.
    """
    traffic = _begin(seed, duration_s)
    products = [traffic.new_blocks(traffic.draw(12, 40)) for _ in range(4)]
    for _ in range(round(AGENTS_PER_H * duration_s / HOUR_S)):
        traffic.add_agent(products[int(len(products) * traffic.chance() ** 2)])
    return traffic.finish()


def make_chats_beside_jobs(seed: int, duration_s: float = 3 * HOUR_S, scale: float = 1.0) -> Trace:
    """Return chats beside jobs that come back every 15 to 60 minutes; ``draw_jobs`` draws how many of each. Pure.

    Args:
        seed: any integer.
        duration_s: time in which chats begin and jobs come back.
        scale: so many times the chats and the documents of the jobs.

    Raises:
        ConfigError: ``duration_s`` is not above zero or longer than a day, or ``scale`` not above zero or above 100.
    """
    if not 0 < scale <= MAX_SCALE:
        raise ConfigError("scale", scale, f"must be a number above 0, up to {MAX_SCALE:g}")
    traffic = _begin(seed, duration_s)
    mix = draw_jobs(traffic.rng, scale)
    traffic.add_chats(round(mix.chats_per_h * duration_s / HOUR_S), _make_apps(traffic))
    for period_s, num, num_tokens in zip(mix.periods_s, mix.num_documents, mix.document_tokens, strict=True):
        traffic.add_job(period_s, num, num_tokens)
    return traffic.finish()


def draw_jobs(rng: random.Random, scale: float = 1.0) -> JobMix:
    """Draw how many chats there are, and the jobs beside them, which name a tenth to nine tenths of the blocks."""
    num_jobs = 1 + int(4 * rng.random())
    chats_per_h = round(150 * scale * 4 ** rng.random())
    share = 0.1 + 0.8 * rng.random()
    blocks_per_h = chats_per_h * CHAT_BLOCKS * share / (1 - share) / num_jobs
    shortest_s, longest_s = JOB_PERIODS_S
    periods_s = tuple(shortest_s * (longest_s / shortest_s) ** rng.random() for _ in range(num_jobs))
    tokens = tuple(round(2_000 * 16 ** rng.random()) for _ in range(num_jobs))
    num_documents = tuple(
        max(1, round(blocks_per_h * period_s / HOUR_S / (num_tokens / BLOCK_TOKENS + 1)))
        for period_s, num_tokens in zip(periods_s, tokens, strict=True)
    )
    return JobMix(chats_per_h, periods_s, num_documents, tokens)


@dataclass(slots=True)
class _Traffic:
    """Requests that are being made.

    Attributes:
        rng: only its ``random`` is used: the same numbers in every version of Python.
        duration_s: no request comes later.
        requests: those made so far, in any order.
        num_ids: ids given so far.
    """

    rng: random.Random
    duration_s: float
    requests: list[TraceRequest] = field(default_factory=list)
    num_ids: int = 0

    def chance(self) -> float:
        """Return a number from 0 to 1."""
        return self.rng.random()

    def draw(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, each as likely."""
        return low + int(self.rng.random() * (high - low + 1))

    def draw_around(self, median: float, sigma: float) -> float:
        """Return a log-normal number."""
        return median * math.exp(sigma * NORMAL.inv_cdf(min(max(self.rng.random(), 1e-9), 1 - 1e-9)))

    def new_blocks(self, count: int) -> list[int]:
        """Return so many new ids."""
        self.num_ids += count
        return list(range(self.num_ids - count, self.num_ids))

    def ask(
        self, arrival_s: float, blocks: Iterable[int], num_tokens: int, num_output: int, stop: StopReason
    ) -> None:
        """Add a request, unless it would come too late."""
        if arrival_s < self.duration_s:
            self.requests.append(TraceRequest(arrival_s, num_tokens, num_output, tuple(blocks), stop))

    def add_chats(self, num_chats: int, apps: list[list[int]]) -> None:
        """Add chats; each begins with the prompt of an application, a few of which have most of them."""
        for _ in range(num_chats):
            blocks = list(apps[int(len(apps) * self.chance() ** 2)])
            num_tokens = BLOCK_TOKENS * len(blocks)
            arrival_s = self.duration_s * self.chance()
            for _ in range(1 + int(self.draw_around(2.5, 0.9))):
                num_tokens += round(self.draw_around(250, 1.2))
                blocks += self.new_blocks(num_tokens // BLOCK_TOKENS - len(blocks))
                num_output = 1 + round(self.draw_around(250, 0.8))
                self.ask(arrival_s, blocks, num_tokens, num_output, StopReason.END_TURN)
                num_tokens += num_output
                arrival_s += num_output / 40 + self.draw_around(60, 1.0)

    def add_agent(self, product: list[int]) -> None:
        """Add a session: tasks of a person, each with many calls of tools."""
        blocks, num_tokens = list(product), BLOCK_TOKENS * len(product)
        arrival_s = self.duration_s * self.chance()
        for _ in range(self.draw(1, 5)):
            num_calls = round(self.draw_around(12, 0.8))
            for call in range(num_calls + 1):
                if num_tokens > MAX_AGENT_TOKENS:
                    return
                num_tokens += round(self.draw_around(400, 1.2))
                blocks += self.new_blocks(num_tokens // BLOCK_TOKENS - len(blocks))
                num_output = 1 + round(self.draw_around(120, 0.8))
                is_last = call == num_calls
                stop = StopReason.END_TURN if is_last else StopReason.TOOL_USE
                self.ask(arrival_s, blocks, num_tokens, num_output, stop)
                num_tokens += num_output
                pause_s = (
                    self.draw_around(150, 1.0) if is_last else self.draw_around(TOOLS_S[self.draw(0, 3)], 0.5)
                )
                arrival_s += num_output / 40 + pause_s

    def add_job(self, period_s: float, num_documents: int, document_tokens: int) -> None:
        """Add a job: in each period the same documents, one after another, each with another question."""
        lengths = [
            max(1, round(self.draw_around(document_tokens, 0.4) / BLOCK_TOKENS)) for _ in range(num_documents)
        ]
        documents = [self.new_blocks(length) for length in lengths]
        begin_s, step_s = period_s * self.chance(), 0.5 * period_s * self.chance() / num_documents
        while begin_s < self.duration_s:
            for number, document in enumerate(documents):
                blocks = [*document, *self.new_blocks(1)]
                self.ask(
                    begin_s + step_s * number, blocks, BLOCK_TOKENS * len(blocks), 100, StopReason.END_TURN
                )
            begin_s += period_s * (0.95 + 0.1 * self.chance())

    def finish(self) -> Trace:
        """Return the trace."""
        return make_trace(self.requests, BLOCK_TOKENS)


MAKERS: dict[str, Callable[[int], Trace]] = {"chat": make_chat, "agents": make_agents}
"""What ``kvtier simulate --example`` names."""


def _make_apps(traffic: _Traffic) -> list[list[int]]:
    return [traffic.new_blocks(traffic.draw(1, 8)) for _ in range(6)]


def _begin(seed: int, duration_s: float) -> _Traffic:
    if not 0 < duration_s <= MAX_HOURS * HOUR_S:
        remedy = f"must be a number of seconds above zero, at most {MAX_HOURS * HOUR_S:g}"
        raise ConfigError("duration_s", duration_s, remedy)
    return _Traffic(random.Random(seed), duration_s)  # noqa: S311 - synthetic traffic, not a secret
