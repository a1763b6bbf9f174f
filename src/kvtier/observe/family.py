"""What a metric family is, and how the numbers of ``stats()`` and ``histograms()`` become its samples.

A family names one path, a dotted name in which a part in braces is a label: ``tier.{tier_index}.{tier}.errors`` reads
the number ``tier.0.fs.errors`` as a sample with ``tier_index="0"`` and ``tier="fs"``. Names of one number that differ
between tiers stand in angle brackets: ``<existed|held_blocks>``. What may be missing stands in square ones, and a label
in it is empty then: ``[.{tier}]``. Nothing else says where a number goes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvtier.histogram import LATENCY_BOUNDS_S, SIZE_BOUNDS_BYTES, HistogramSnapshot

_LABEL = re.compile(r"\{(?P<label>\w+)(?::(?P<values>[\w|]+))?\}")
_CHOICE = re.compile(r"<([\w|]+)>")

LABEL_FORMS = {"tier_index": r"[0-9]+", "cause": r"[^.]+", "bound": r"[^.]+", "length": r"[0-9]+"}
"""What a label's value looks like, where it is not any text: a tier's type may have dots."""

LABEL_WORDS = {"CPU": "host"}
"""Values that the connector has from its engine's words, and the word that operators read."""


class Kind(Enum):
    """Type of a metric family, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricsSource(Protocol):
    """What has numbers to show: an engine, or the scheduler half of the connector."""

    def stats(self) -> Mapping[str, float]:
        """Return counters and gauges by dotted name. Thread: any."""

    def histograms(self) -> Mapping[str, HistogramSnapshot]:
        """Return histograms by dotted name. Thread: any."""


@dataclass(frozen=True)
class Family:
    """A metric family.

    Attributes:
        name: its name, without the ending ``_total`` of a counter.
        kind: its type.
        help: what it means; Markdown.
        path: where it is read.
        unit: unit of its values, as people write it.
        vllm_name: its name on vLLM's own metrics page, where that has a family that means the same; empty: ``name``.
        bounds: upper ends of a histogram's buckets.
        labels: names of its labels, in the order of the path.
    """

    name: str
    kind: Kind
    help: str
    path: str
    unit: str
    vllm_name: str = ""
    bounds: tuple[float, ...] = ()
    labels: tuple[str, ...] = field(init=False)
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(part["label"] for part in _LABEL.finditer(self.path)))
        object.__setattr__(self, "_pattern", re.compile(_pattern_of(self.path)))

    @property
    def sample_name(self) -> str:
        """The name under which a query finds it outside vLLM."""
        return self.name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def vllm_sample_name(self) -> str:
        """The name under which a query finds it on vLLM's metrics page."""
        return (self.vllm_name or self.name) + ("_total" if self.kind is Kind.COUNTER else "")

    def label_values(self, dotted_name: str) -> tuple[str, ...] | None:
        """Return the values of the labels of a number, None when the family does not read it. Pure."""
        found = self._pattern.fullmatch(dotted_name)
        if found is None:
            return None
        return tuple(LABEL_WORDS.get(value, value) for value in found.groups(default=""))


def counter(name: str, path: str, meaning: str, unit: str, vllm_name: str = "") -> Family:
    """Return a counter; it counts from the engine's start."""
    return Family(name, Kind.COUNTER, meaning, path, unit, vllm_name)


def gauge(name: str, path: str, meaning: str, unit: str, vllm_name: str = "") -> Family:
    """Return a gauge."""
    return Family(name, Kind.GAUGE, meaning, path, unit, vllm_name)


def latency(name: str, path: str, meaning: str, vllm_name: str = "") -> Family:
    """Return a histogram of seconds."""
    return Family(name, Kind.HISTOGRAM, meaning, path, "seconds", vllm_name, LATENCY_BOUNDS_S)


def size(name: str, path: str, meaning: str, vllm_name: str = "") -> Family:
    """Return a histogram of bytes."""
    return Family(name, Kind.HISTOGRAM, meaning, path, "bytes", vllm_name, SIZE_BOUNDS_BYTES)


class Sample(NamedTuple):
    """Where a number belongs.

    Attributes:
        family: the metric family.
        label_values: values of its labels, in their order.
    """

    family: Family
    label_values: tuple[str, ...]


class SampleFinder:
    """Finds the family and the labels of a number by its dotted name, and remembers them.

    Any thread may use it: two that look up a new name at the same time find and remember the same.

    Args:
        families: the declared ones.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = tuple(families)
        self._known: dict[str, Sample | None] = {}

    def find(self, dotted_name: str) -> Sample | None:
        """Return where a number belongs; None when no family reads it, as with a tier of one's own."""
        if dotted_name not in self._known:
            self._known[dotted_name] = self._search(dotted_name)
        return self._known[dotted_name]

    def _search(self, dotted_name: str) -> Sample | None:
        for family in self._families:
            values = family.label_values(dotted_name)
            if values is not None:
                return Sample(family, values)
        return None


def unread(families: Sequence[Family], dotted_names: Iterable[str]) -> list[str]:
    """Return the names that no family reads. Pure."""
    finder = SampleFinder(families)
    return [name for name in dotted_names if finder.find(name) is None]


def _pattern_of(path: str) -> str:
    return "".join(_pieces_of(path))


def _pieces_of(path: str) -> Iterator[str]:
    end = 0
    for part in _LABEL.finditer(path):
        yield _literal(path[end : part.start()])
        yield f"({part['values'] or LABEL_FORMS.get(part['label'], '.*')})"
        end = part.end()
    yield _literal(path[end:])


def _literal(text: str) -> str:
    """Return the pattern of a piece of a path that is no label."""
    pattern = _CHOICE.sub(r"(?:\1)", text.replace(".", r"\."))
    return pattern.replace("[", "(?:").replace("]", ")?")
