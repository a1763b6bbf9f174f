"""The result of one row, and the page that all of them make."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.identity.peers import PEERS

SAME_ANSWER = "same answer"
"""What a row says whose engines answer alike where their keys and values cannot be read."""

UNCHANGED = "nothing"
"""Group of the rows whose blocks must be found."""


@dataclass(frozen=True)
class Row:
    """The result of one change.

    Attributes:
        group: heading that it belongs to.
        name: the change, in words.
        num_found: prompt tokens that the second engine loaded from the first one's blocks.
        num_shared: tokens that it may load.
        difference: by how much its own keys and values differ at most; in words where no number can be said.
        separated_by: whether the key of each peer differs, by the peer's name; absent where it was not asked.
    """

    group: str
    name: str
    num_found: int
    num_shared: int
    difference: float | str
    separated_by: Mapping[str, bool]

    @property
    def is_leak(self) -> bool:
        """Whether blocks were found that belong to the other engine alone."""
        return self.num_found > self.num_shared

    @property
    def is_lost(self) -> bool:
        """Whether blocks were not found although both engines have them in common."""
        return self.num_found < self.num_shared


def render_table(rows: Iterable[Row]) -> str:
    """Return the rows as a table in Markdown. Pure."""
    names = [peer.name for peer in PEERS]
    lines = [f"| | change | found / may be found | bytes differ by | {' | '.join(names)} |"]
    lines.append("|---|---|---:|---:|" + "---|" * len(names))
    lines += [_line(row, names) for row in rows]
    return "\n".join(lines) + "\n"


def summarize(rows: Sequence[Row]) -> str:
    """Return the sums of all rows in one sentence. Pure."""
    leaks, lost = sum(row.is_leak for row in rows), sum(row.is_lost for row in rows)
    changes = [row for row in rows if row.group != UNCHANGED]
    text = f"Of {len(rows)} rows {leaks} find blocks of the other engine."
    text += f" Of those that both have in common {lost} are missed."
    for peer in PEERS:
        asked = [row for row in changes if peer.name in row.separated_by]
        if asked:
            shared = [row for row in asked if not row.separated_by[peer.name] and not row.num_shared]
            wrong = sum(row.difference not in (0, SAME_ANSWER) for row in shared)
            text += f" The key of {peer.name} is the same in {len(shared)} of {len(asked)} changes."
            text += f" The bytes differ in {wrong} of those."
    return text


def _line(row: Row, peers: Iterable[str]) -> str:
    difference = row.difference if isinstance(row.difference, str) else f"{row.difference:.2g}"
    verdicts = [
        {True: "another key", False: "same key", None: ""}[row.separated_by.get(name)] for name in peers
    ]
    found = (
        f"**{row.num_found}** / {row.num_shared}" if row.is_leak else f"{row.num_found} / {row.num_shared}"
    )
    return f"| {row.group} | {row.name} | {found} | {difference} | {' | '.join(verdicts)} |"
