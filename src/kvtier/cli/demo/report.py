"""The results of the demo: each turn with kvtier and without, the restart, and the totals. Source of ``--json``."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.cli.demo.conversation import Turn

DEVICE, HOST, COMPUTED = "device", "host", "computed"
"""Origins of prompt tokens, as the engine names them; the origin of a tier's tokens is the tier's type."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One served request.

    Attributes:
        turn: the planned turn.
        prompt: the whole prompt.
        token_ids: the answer.
        sources: prompt tokens by origin.
        first_token_s: time to first token.
    """

    turn: Turn
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    sources: Mapping[str, int]
    first_token_s: float

    def has_same_answer(self, other: "ServedTurn") -> bool:
        """Return whether prompt and answer equal those of ``other``. Pure."""
        return self.prompt == other.prompt and self.token_ids == other.token_ids


@dataclass(frozen=True, slots=True)
class RunComparison:
    """One turn, served with kvtier and without.

    Attributes:
        with_tiers: result of the engine with kvtier.
        without: result of the same engine without kvtier.
    """

    with_tiers: ServedTurn
    without: ServedTurn

    @property
    def turn(self) -> Turn:
        """The planned turn."""
        return self.with_tiers.turn

    @property
    def is_identical(self) -> bool:
        """Whether both gave the same answer to the same prompt."""
        return self.with_tiers.has_same_answer(self.without)


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over several turns.

    Attributes:
        num_turns: turns.
        num_prompt_tokens: tokens of their prompts.
        sources: prompt tokens by origin, with kvtier.
        with_s: sum of the times to first token with kvtier.
        without_s: the same without.
    """

    num_turns: int
    num_prompt_tokens: int
    sources: Mapping[str, int]
    with_s: float
    without_s: float

    @property
    def speed_up(self) -> float:
        """Time to first token without kvtier over that with kvtier; 1 when there was none."""
        return self.without_s / self.with_s if self.with_s else 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """All results of the demo.

    Attributes:
        tier: type of the secondary tier.
        model: description of the model, for the table.
        turns: every turn in the order of service.
        restarted: turns served once more by a new process, paired with their run without kvtier.
        settings: the options of the demo.
        wall_s: duration of the whole demo.
    """

    tier: str
    model: str
    turns: Sequence[RunComparison]
    restarted: Sequence[RunComparison]
    settings: Mapping[str, Any]  # Any: JSON
    wall_s: float

    @property
    def all_turns(self) -> Total:
        """The sums over every turn."""
        return add_up(self.turns)

    @property
    def cold_turns(self) -> Total:
        """The turns that found nothing. They are the same work in both runs."""
        return add_up(compared for compared in self.turns if set(compared.with_tiers.sources) == {COMPUTED})

    @property
    def later_turns(self) -> Total:
        """The turns after the first of each conversation. They have a prefix to find."""
        return add_up(compared for compared in self.turns if compared.turn.number > 1)

    @property
    def after_restart(self) -> Total:
        """The turns that the new process served."""
        return add_up(self.restarted)

    @property
    def restart_ratio(self) -> float:
        """Share of the new process's prompt tokens that came from the tier."""
        total = self.after_restart
        return total.sources.get(self.tier, 0) / max(1, total.num_prompt_tokens)

    @property
    def is_identical(self) -> bool:
        """Whether every answer, after the restart too, equals the one without kvtier."""
        return all(compared.is_identical for compared in [*self.turns, *self.restarted])


def compare(with_tiers: Iterable[ServedTurn], without: Iterable[ServedTurn]) -> list[RunComparison]:
    """Pair turns with their counterparts, in order. Pure."""
    return [RunComparison(*pair) for pair in zip(with_tiers, without, strict=True)]


def add_up(turns: Iterable[RunComparison]) -> Total:
    """Return the sums over several turns. Pure."""
    compared = list(turns)
    sources: Counter[str] = Counter()
    for one in compared:
        sources.update(one.with_tiers.sources)
    return Total(
        num_turns=len(compared),
        num_prompt_tokens=sum(len(one.with_tiers.prompt) for one in compared),
        sources=dict(sources),
        with_s=sum(one.with_tiers.first_token_s for one in compared),
        without_s=sum(one.without.first_token_s for one in compared),
    )


def to_json(report: Report) -> dict[str, Any]:  # Any: JSON
    """Return the numbers as JSON objects; times in seconds. Pure."""
    return {
        "model": report.model,
        "tier": report.tier,
        "settings": dict(report.settings),
        "identical": report.is_identical,
        "turns": [_turn_to_json(compared) for compared in report.turns],
        "all_turns": _total_to_json(report.all_turns),
        "cold_turns": _total_to_json(report.cold_turns),
        "later_turns": _total_to_json(report.later_turns),
        "restart": {
            "turns": [_turn_to_json(compared) for compared in report.restarted],
            "tier_ratio": report.restart_ratio,
            **_total_to_json(report.after_restart),
        },
        "wall_s": report.wall_s,
    }


def _turn_to_json(compared: RunComparison) -> dict[str, Any]:  # Any: JSON
    return {
        "turn": compared.turn.label,
        "prompt_tokens": len(compared.with_tiers.prompt),
        "sources": dict(compared.with_tiers.sources),
        "sources_without": dict(compared.without.sources),
        "first_token_with_s": compared.with_tiers.first_token_s,
        "first_token_without_s": compared.without.first_token_s,
        "identical": compared.is_identical,
        "answer": list(compared.with_tiers.token_ids),
    }


def _total_to_json(total: Total) -> dict[str, Any]:  # Any: JSON
    return {
        "num_turns": total.num_turns,
        "prompt_tokens": total.num_prompt_tokens,
        "sources": dict(total.sources),
        "first_token_with_s": total.with_s,
        "first_token_without_s": total.without_s,
        "speed_up": total.speed_up,
    }
