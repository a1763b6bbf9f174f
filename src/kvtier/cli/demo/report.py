"""The results of the demo: one turn without kvtier, with it and after the restart, as a table and as JSON.

The turn shown is the median of the conversations' last turns, by the time that kvtier saves. A sum over all turns would
mix those whose prefix has left the device with those that find everything there, with kvtier and without.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.cli.demo.conversation import ServedTurn, take_last_turns
from kvtier.cli.output import make_table

COMPUTED = "computed"

ROWS = ("without", "with", "after_restart")
"""Rows of the table in JSON."""

BUSY_RATIO = 1.25
"""How much the two runs may differ where they do the same work. Beyond it another program used the processor during one
of them and the times mean little; on a quiet machine they differ by at most a tenth."""


@dataclass(frozen=True, slots=True)
class Report:
    """All results of the demo.

    Attributes:
        tier: type of the secondary tier.
        model: description of the model.
        options: those of the demo.
        without: every turn in the order of service, by the engine without kvtier.
        with_kvtier: the same turns by the engine with kvtier.
        restarted: the last turn of each conversation, served once more by a new process.
        wall_s: duration of the whole demo.
    """

    tier: str
    model: str
    options: Mapping[str, Any]  # Any: JSON
    without: Sequence[ServedTurn]
    with_kvtier: Sequence[ServedTurn]
    restarted: Sequence[ServedTurn]
    wall_s: float

    @property
    def origins(self) -> tuple[str, ...]:
        """Where a prompt token can come from, the fastest first."""
        return ("device", "host", self.tier, COMPUTED)

    @property
    def shown(self) -> tuple[ServedTurn, ServedTurn, ServedTurn]:
        """The turn of the table: without kvtier, with it, and after the restart."""
        runs = (take_last_turns(self.without), take_last_turns(self.with_kvtier), self.restarted)
        by_gain = sorted(
            zip(*runs, strict=True), key=lambda served: served[0].first_token_s - served[1].first_token_s
        )
        return by_gain[(len(by_gain) - 1) // 2]

    @property
    def is_identical(self) -> bool:
        """Whether every answer, after the restart too, equals the one without kvtier."""
        pairs = [*zip(self.without, self.with_kvtier, strict=True)]
        pairs += zip(take_last_turns(self.without), self.restarted, strict=True)
        return all(one.has_same_answer(other) for one, other in pairs)

    @property
    def restart_ratio(self) -> float:
        """Share of the new process's prompt tokens that came from the tier."""
        sources = add_sources(self.restarted)
        return sources[self.tier] / sources.total()

    @property
    def cold_s(self) -> tuple[float, float]:
        """Time to first token of the turns that found nothing, without kvtier and with it."""
        pairs = zip(self.without, self.with_kvtier, strict=True)
        cold = [(one, other) for one, other in pairs if set(other.sources) == {COMPUTED}]
        return sum(one.first_token_s for one, _ in cold), sum(other.first_token_s for _, other in cold)


def add_sources(turns: Iterable[ServedTurn]) -> Counter[str]:
    """Return the prompt tokens of ``turns`` by origin. Pure."""
    sources: Counter[str] = Counter()
    for turn in turns:
        sources.update(turn.sources)
    return sources


def print_report(report: Report, console: Console) -> None:
    """Print the table and the summary."""
    console.print(make_turn_table(report))
    for line in summarize(report):
        console.print(line, highlight=False, soft_wrap=True)


def make_turn_table(report: Report) -> Table:
    """Return a row for each time that the turn was served. Pure."""
    turn = report.shown[0].turn
    title = f"Turn {turn.number} of conversation {turn.conversation}, the median last turn by time saved"
    table = make_table(title, [""], ["prompt", *report.origins, "first token"])
    for name, served in zip(("without kvtier", "with kvtier", "after a restart"), report.shown, strict=True):
        counts = (str(served.sources.get(origin, 0)) for origin in report.origins)
        table.add_row(name, str(len(served.prompt)), *counts, f"{served.first_token_s:.2f} s")
    return table


def summarize(report: Report) -> Iterator[str]:
    """Yield the summary in sentences. Pure."""
    sources = add_sources(report.with_kvtier)
    shares = ", ".join(f"{name} {sources[name] / sources.total():.0%}" for name in report.origins)
    yield f"model: {report.model}; without kvtier: the same device pool with its own prefix cache"
    yield f"prompt tokens of all {len(report.with_kvtier)} turns with kvtier: {shares}"
    yield f"after a restart in a new process: {report.restart_ratio:.0%} of prompt tokens from {report.tier}"
    without_s, with_s = report.cold_s
    if max(without_s, with_s) > BUSY_RATIO * min(without_s, with_s):
        yield (
            f"warning: turns that are the same work in both runs took {without_s:.2f} s and {with_s:.2f} s; "
            "another program used this machine: measure again"
        )
    yield f"tokens identical: {'yes' if report.is_identical else 'no'}"
    yield f"took {report.wall_s:.0f} s"


def to_json(report: Report) -> dict[str, Any]:  # Any: JSON
    """Return the numbers as JSON objects; times in seconds. Pure."""
    return {
        "model": report.model,
        "tier": report.tier,
        "settings": dict(report.options),
        "turn": {name: _to_json(served) for name, served in zip(ROWS, report.shown, strict=True)},
        "sources": dict(add_sources(report.with_kvtier)),
        "restart": {"num_turns": len(report.restarted), "tier_ratio": report.restart_ratio},
        "identical": report.is_identical,
        "wall_s": report.wall_s,
    }


def _to_json(served: ServedTurn) -> dict[str, Any]:  # Any: JSON
    return {
        "prompt_tokens": len(served.prompt),
        "sources": dict(served.sources),
        "first_token_s": served.first_token_s,
    }
