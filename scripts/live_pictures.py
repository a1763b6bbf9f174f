"""Draw what a real engine shows: a screen of ``kvtier top``, and the dashboard's queries as Prometheus answers them.

    python -m scripts.live_pictures      takes about a minute, needs Prometheus; rewrites two files in docs/pictures

The engine is small. Its prompts are new at first and then come again and again; in the middle everything is purged.
"""

import io
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from rich.console import Console
from tests.deploy.prometheus_process import PrometheusProcess
from tests.deploy.queries import PRESENT

from kvtier.cli.live.top import draw as draw_top
from kvtier.cli.live.top import watch
from kvtier.engines.transformers import KVTierEngine
from kvtier.observe.control_client import EngineConnection, choose_instance
from scripts.dashboard import ROWS, Panel, expression_of
from scripts.small_engine import ROW_BYTES, WAIT_S, prompt_of, running_engine
from scripts.small_multiples import COLOURS, Curves, Series, draw

FOLDER = Path("docs/pictures")

TITLES = (
    "Hit share by origin",
    "Computed tokens by cause",
    "Host memory",
    "Writes",
    "Reads",
    "Fill",
)
"""The panels that are drawn, of some twenty."""

NUM_PROMPTS = 40
PAUSE_S = 0.02
PART_S = 14.0
"""A quarter of the time: the purge comes after two."""

STEP_S = 1.0
RATE_INTERVAL = "6s"
"""Over which rates are taken: Grafana takes four scrapes at least."""

TOP_WIDTH = 92

TOP_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""
"""Rich's own template without the address of a font: a picture in a page may not load one."""


def main() -> int:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_RUNTIME_DIR"] = name  # the only engine that ``top`` finds
        tier = {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "2MiB"}
        settings = {"cpu_bytes_to_use": 32 * ROW_BYTES, "secondary_tiers": [tier], "record_trace": ""}
        with running_engine(folder, **settings, instance_id="chat", metrics_port=0) as engine:
            assert engine.metrics is not None
            place = engine.metrics.url.removeprefix("http://").removesuffix("/metrics")
            (folder / "prometheus").mkdir()
            with PrometheusProcess(folder / "prometheus", {"kvtier": place}) as prometheus:
                prometheus.ask_until_known(["kvtier_requests"])
                began_s = time.time()
                screen = serve(engine)
                panels = [ask(prometheus, find_panel(title), began_s) for title in TITLES]
    (FOLDER / "top.svg").write_text(screen, encoding="utf-8")
    (FOLDER / "dashboard.svg").write_text(draw(panels, 4 * PART_S), encoding="utf-8")
    print(f"{FOLDER}/top.svg, {FOLDER}/dashboard.svg")
    return 0


def serve(engine: KVTierEngine) -> str:
    """Give the engine its traffic; return a screen of ``top`` from the end of the second part."""
    with ThreadPoolExecutor(1) as client:
        run_for(engine, PART_S)
        screen = client.submit(take_screen)
        run_for(engine, PART_S)
        purge = client.submit(purge_all)
        run_for(engine, 2 * PART_S)
        purge.result()
        return screen.result()


def run_for(engine: KVTierEngine, duration_s: float) -> None:
    """Ask the same prompts in turn, each for the device as if it were new."""
    end_s = time.monotonic() + duration_s
    for seed in cycle(range(NUM_PROMPTS)):
        engine.drop_device_cache()
        engine.run(prompt_of(seed), 1)
        if time.monotonic() > end_s:
            return
        time.sleep(PAUSE_S)


def take_screen() -> str:
    """Return what ``kvtier top`` shows, as SVG."""
    time.sleep(PART_S / 2)
    console = Console(record=True, width=TOP_WIDTH, file=io.StringIO())
    console.print(draw_top(next(watch(choose_instance("chat"), 2.0))))
    return console.export_svg(title="kvtier top", code_format=TOP_FORMAT, unique_id="top")


def purge_all() -> None:
    """Do what ``kvtier purge --instance chat --all`` does."""
    with EngineConnection(choose_instance("chat").path) as connection:
        connection.ask("purge", WAIT_S, all=True)


def find_panel(title: str) -> Panel:
    """Return a panel of the dashboard. Pure."""
    return next(panel for panels in ROWS.values() for panel in panels if panel.title == title)


def ask(prometheus: PrometheusProcess, panel: Panel, began_s: float) -> Curves:
    """Return what the queries of a panel gave over the run."""
    series: list[Series] = []
    for query in panel.queries:
        text = expression_of(query.text)
        for variable, value in {**PRESENT, "$__rate_interval": RATE_INTERVAL}.items():
            text = text.replace(variable, value)
        for found in prometheus.ask_range(text, began_s, began_s + 4 * PART_S, STEP_S):
            name = query.legend
            for label, value in found["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [(at_s - began_s, float(value)) for at_s, value in found["values"]]
            if any(value for _, value in points):
                series.append(Series(name, points))
    return Curves(panel.title, panel.unit, series[: len(COLOURS)], panel.most)


if __name__ == "__main__":
    sys.exit(main())
