"""``top`` shows where tokens come from, why others are computed, and how the tiers do."""

import json
from collections.abc import Callable

import pytest
from rich.console import Console
from tests.observe.controlled import Engine

from kvtier.cli.live.top import Frame, Share, draw, format_rate, make_frame, watch
from kvtier.errors import ControlError
from kvtier.observe.control_client import Instance

BEFORE = {
    "connector.prompt_tokens.device": 100.0,
    "connector.prompt_tokens.fs": 0.0,
    "connector.missed_tokens.evicted.host": 50.0,
    "tier.0.fs.loaded_bytes": 0.0,
    "tier.0.fs.stored_bytes": 2.0**20,
}
NOW = {
    "connector.prompt_tokens.device": 300.0,
    "connector.prompt_tokens.fs": 100.0,
    "connector.missed_tokens.evicted.host": 150.0,
    "connector.missed_tokens.never_seen": 450.0,
    "connector.requests": 3.0,
    "waiting_requests": 2.0,
    "primary.held_blocks": 8.0,
    "primary.capacity_blocks": 32.0,
    "tier.0.fs.loaded_bytes": 3 * 2.0**20,
    "tier.0.fs.stored_bytes": 2.0**20,
    "tier.0.fs.indexed_blocks": 1234.0,
    "tier.0.fs.load_bytes_per_s": 5 * 2.0**30,
    "tier.0.fs.queued_blocks": 7.0,
    "tier.0.fs.pending_blocks": 5.0,
    "tier.1.obj.out_of_service": 1.0,
    "tier.2.valkey.breaker_open": 1.0,
}


@pytest.fixture
def frame() -> Frame:
    return make_frame("serving", BEFORE, NOW, 2.0, is_stepping=True)


def show(frame: Frame, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(draw(frame))
    return capture.get()


def test_tokens_by_origin_sum_to_all_prompts(frame: Frame) -> None:
    assert frame.origins == [
        Share("device", 300, 0.3, 100.0),
        Share("fs", 100, 0.1, 50.0),
        Share("computed", 600, 0.6, 275.0),
    ]
    assert sum(share.ratio for share in frame.origins) == pytest.approx(1.0)


def test_causes_are_those_of_the_computed_tokens_the_largest_first(frame: Frame) -> None:
    assert frame.causes == [Share("never_seen", 450, 0.45, 225.0), Share("evicted.host", 150, 0.15, 50.0)]


def test_tiers_have_fill_bandwidth_queue_and_breaker(frame: Frame) -> None:
    host, fs, obj, valkey = frame.tiers

    assert (host.name, host.num_blocks, host.capacity_blocks) == ("host", 8.0, 32.0)
    assert (fs.num_blocks, fs.read_bytes_per_s, fs.write_bytes_per_s) == (1234.0, 1.5 * 2**20, 0.0)
    assert (fs.num_queued_blocks, fs.num_pending_blocks, fs.state) == (7.0, 5.0, "closed")
    assert (obj.state, valkey.state) == ("out of service", "open")


def test_a_frame_shows_each_of_them(frame: Frame) -> None:
    shown = show(frame)

    for part in (
        "serving",
        "3 requests, 2 wait for a tier",
        "stepping",
        "never_seen",
        "60.0 %",
        "25 %",
        "1.5 MiB/s",
        "5.0 GiB/s",
        "out of service",
    ):
        assert part in shown


@pytest.mark.parametrize("width", [120, 80, 70])
def test_no_cell_is_cut_on_a_narrow_terminal(width: int) -> None:
    full = {"tier.0.fs.indexed_blocks": 1_234_567.0, "tier.0.fs.loaded_bytes": 9e9}
    shown = show(make_frame("serving", BEFORE, NOW | full, 2.0, is_stepping=True), width)

    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for part in ("host", "valkey", "1,234,567", "4.2 GiB/s", "5.0 GiB/s", "pending", "out of service"):
        assert part in shown


@pytest.mark.parametrize(("width", "num_full"), [(120, 12), (70, 6)])
def test_bars_are_as_long_as_their_shares_of_what_the_terminal_leaves(
    frame: Frame, width: int, num_full: int
) -> None:
    lines = show(frame, width).splitlines()
    computed, fs = (
        next(line for line in lines if line.startswith(f" {name} ")) for name in ("computed", "fs")
    )
    assert computed.count("█") == num_full
    assert fs.count("█") == num_full // 6


def test_an_engine_without_a_request_has_no_share() -> None:
    frame = make_frame("new", {}, {}, 1.0, is_stepping=False)

    assert frame.origins == [Share("computed", 0, 0.0, 0.0)]
    assert "none yet" in show(frame)


def test_top_prints_one_frame(engine: Engine, run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("top", "--once", "--interval", "0.1")

    assert status == 0
    assert "serving" in out
    assert "25 %" in out


def test_top_prints_one_frame_as_json(engine: Engine, run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("top", "--once", "--json", "--interval", "0.1")

    assert status == 0
    assert json.loads(out)["tiers"][0]["num_blocks"] == 4.0


def test_an_engine_that_ends_ends_the_frames(engine: Engine) -> None:
    frames = watch(Instance(engine.path, engine.ask("hello")), 0.0, lambda _: None)
    assert next(frames).title.startswith("serving")
    engine.close()

    with pytest.raises(ControlError, match="has ended"):
        next(frames)


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "-"), (5.0, "5 B/s"), (2048.0, "2.0 KiB/s"), (3.5 * 2**50, "3584.0 TiB/s")]
)
def test_a_rate_has_a_unit(rate: float | None, text: str) -> None:
    assert format_rate(rate) == text
