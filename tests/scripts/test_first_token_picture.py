"""The picture of README is drawn from kept numbers, for light and for dark pages."""

import json
import re
from pathlib import Path

import pytest

from scripts import first_token_picture

ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "docs" / "results" / "first-token.json"

pytest.importorskip("matplotlib")


def draw_all(monkeypatch: pytest.MonkeyPatch, numbers: Path, target: Path) -> dict[str, str]:
    """Run the script; return the pictures by kind of page."""
    monkeypatch.setattr("sys.argv", ["first_token_picture", str(numbers), str(target)])
    assert first_token_picture.main() == 0
    return {kind: Path(f"{target}-{kind}.svg").read_text() for kind in first_token_picture.PALETTES}


def colours(svg: str) -> set[str]:
    """Return the colours of a picture."""
    return set(re.findall(r"fill: (#[0-9a-f]{6})", svg))


def test_there_is_one_for_light_and_one_for_dark_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = draw_all(monkeypatch, NUMBERS, tmp_path / "picture")

    for kind, palette in first_token_picture.PALETTES.items():
        assert {palette.text, palette.computed, palette.loaded} <= colours(pictures[kind])
    assert not colours(pictures["light"]) & colours(pictures["dark"])


def test_other_numbers_give_other_pictures_and_equal_ones_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = json.loads(NUMBERS.read_text())
    other["ms"]["fs"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(other))

    first = draw_all(monkeypatch, NUMBERS, tmp_path / "first")

    assert draw_all(monkeypatch, NUMBERS, tmp_path / "second") == first
    assert draw_all(monkeypatch, tmp_path / "other.json", tmp_path / "third")["light"] != first["light"]


def test_the_pictures_in_the_docs_are_of_the_kept_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw_all(monkeypatch, NUMBERS, tmp_path / "first-token")

    for kind, text in drawn.items():
        kept = (ROOT / "docs" / "pictures" / f"first-token-{kind}.svg").read_text()
        assert widths(kept) == pytest.approx(widths(text))


def widths(svg: str) -> list[float]:
    """Return the lengths of the bars, the longest as 1: what does not depend on the outlines of a font."""
    paths = re.findall(r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*" [^>]*style="fill: (#[0-9a-f]{6})"', svg)
    bar_colours = {
        colour for one in first_token_picture.PALETTES.values() for colour in (one.computed, one.loaded)
    }
    lengths = [float(right) - float(left) for left, right, colour in paths if colour in bar_colours]
    assert len(lengths) == len(first_token_picture.NAMES)
    return [length / max(lengths) for length in lengths]
