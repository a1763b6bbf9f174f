"""The tables of a page: rows of cells, and their HTML. Text from outside is escaped here."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = ' class="number"'


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        text: what is shown.
        value: the number behind it, exact; None for text.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        name: unique on a page, of letters, digits and "-".
        caption: what it is.
        headings: of the columns.
        rows: cells, as many as there are headings.
    """

    name: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def render_table(table: Table) -> str:
    """Return a table as HTML. Pure."""
    numeric = [any(cell.value is not None for cell in column) for column in zip(*table.rows, strict=True)]
    head = "".join(
        f'<th scope="col"{_NUMBER if is_number else ""}>{html.escape(heading)}</th>'
        for heading, is_number in zip(table.headings, numeric, strict=True)
    )
    body = "\n".join(f"<tr>{_render_cells(row, numeric)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table id="{table.name}"><caption>{html.escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def render_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a list of definitions. Pure."""
    return (
        '<dl class="facts">'
        + "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts)
        + "</dl>"
    )


def render_headline(numbers: Iterable[tuple[str, str]]) -> str:
    """Return headline numbers, each a value and what it is. Pure."""
    return (
        '<dl class="headline">'
        + "".join(
            f"<div><dt>{html.escape(what)}</dt><dd>{html.escape(value)}</dd></div>" for value, what in numbers
        )
        + "</dl>"
    )


def _render_cells(row: Sequence[Cell], numeric: Sequence[bool]) -> str:
    return "".join(
        f"<td{_NUMBER if is_number else ''}{_exact(cell)}>{html.escape(cell.text)}</td>"
        for cell, is_number in zip(row, numeric, strict=True)
    )


def _exact(cell: Cell) -> str:
    return "" if cell.value is None else f' data-value="{cell.value!r}"'
