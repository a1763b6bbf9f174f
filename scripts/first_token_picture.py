"""Draw the time to the first token of a prompt by where it comes from: the picture at the top of README.

It reads what ``scripts.results_table --first-token`` has kept, and writes one picture for light and one for dark pages,
both with a transparent ground. The same numbers give the same files.

    python -m scripts.first_token_picture docs/results/first-token.json docs/pictures/first-token
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAMES = {
    "computed": "computed",
    "fs": "from the fs tier (page cache)",
    "host": "from host memory",
    "device": "from device memory",
}
"""Origins, top to bottom, as the picture names them."""

SIZE_INCHES = (7.6, 2.2)
DIGITS = 1


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one kind of page.

    Attributes:
        text: of names and numbers.
        computed: bar of the prompt that is computed.
        loaded: bars of the prompts that are loaded.
    """

    text: str
    computed: str
    loaded: str


PALETTES = {
    "light": Palette(text="#24292f", computed="#9aa4b2", loaded="#3f51b5"),
    "dark": Palette(text="#e6edf3", computed="#7d8590", loaded="#9fa8ff"),
}


def main() -> int:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("numbers", type=Path, help="the JSON of the times")
    parser.add_argument("picture", type=Path, help="the files to write, without -light.svg and -dark.svg")
    options = parser.parse_args()
    numbers = json.loads(options.numbers.read_text(encoding="utf-8"))
    for name, palette in PALETTES.items():
        draw(numbers["ms"], numbers["tokens"], palette, Path(f"{options.picture}-{name}.svg"))
    return 0


def draw(times_ms: Mapping[str, float], num_tokens: int, palette: Palette, path: Path) -> None:
    """Write a bar for each origin, with its number behind it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "first-token", "text.color": palette.text}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        names = [name for name in NAMES if name in times_ms]
        values = [times_ms[name] for name in names]
        colours = [palette.computed if name == "computed" else palette.loaded for name in names]
        bars = axes.barh(range(len(names)), values, color=colours, height=0.62)
        axes.bar_label(bars, [format_time(value) for value in values], padding=5, color=palette.text)
        axes.set_yticks(range(len(names)), [NAMES[name] for name in names], color=palette.text)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.14 * max(values))
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        title = f"Time to the first token of a prompt of {num_tokens:,} tokens"
        axes.set_title(title, loc="left", fontsize=11, color=palette.text)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def format_time(time_ms: float) -> str:
    """Return a time as the picture says it. Pure."""
    return f"{time_ms:,.0f} ms" if time_ms >= 100 else f"{time_ms:.{DIGITS}f} ms"


if __name__ == "__main__":
    sys.exit(main())
