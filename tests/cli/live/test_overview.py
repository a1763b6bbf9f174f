"""``ps``, ``stats`` and ``recent`` print what a living engine says, and one line where there is none."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.observe.controlled import Engine

from kvtier.cli.live.overview import describe_tiers, format_age, list_tiers, read_fill
from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord

PROMPT = list(range(17))


Run = Callable[..., tuple[int, str, str]]


def test_ps_lists_engines_and_how_full_they_are(engine: Engine, run: Run) -> None:
    status, out, _ = run("ps")

    assert status == 0
    for part in ("serving", "model", "25 % full", "none"):
        assert part in out


def test_ps_as_json(engine: Engine, run: Run) -> None:
    status, out, _ = run("ps", "--json")
    (row,) = json.loads(out)

    assert status == 0
    assert (row["id"], row["fill"], row["socket"]) == ("serving", {"host": 0.25}, str(engine.path))


def test_ps_without_an_engine_says_where_it_looked(runtime: Path, run: Run) -> None:
    status, out, err = run("ps")

    assert status == 1
    assert out == ""
    assert str(runtime) in err
    assert len(err.splitlines()) == 1


def test_ps_without_an_engine_is_an_empty_list(runtime: Path, run: Run) -> None:
    assert run("ps", "--json")[:2] == (1, "[]\n")


def test_stats_prints_every_number(engine: Engine, run: Run) -> None:
    status, out, _ = run("stats", "--json")

    assert status == 0
    assert json.loads(out)["stats"] == engine.half.stats()
    status, out, _ = run("stats")
    assert all(name in out for name in engine.half.stats())


def test_without_an_engine_every_command_says_the_same_line_and_ends_with_status_one(
    runtime: Path, run: Run, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[1, 2, 3]")
    commands = [
        ["ps"],
        ["stats"],
        ["recent"],
        ["top", "--once"],
        ["why"],
        ["audit"],
        ["drain"],
        ["ps", "--json"],
    ]
    commands += [[name, "--tokens", str(tokens)] for name in ("pin", "unpin", "prefetch")]
    commands += [["purge", "--instance", "chat", "--all"], ["why", "--json"], ["stats", "chat"]]
    answers = {run(*command)[::2] for command in commands}
    ((status, err),) = answers
    assert status == 1
    assert err.startswith(f"kvtier: no engine with a control socket runs as this user; looked in {runtime}")
    assert len(err.splitlines()) == 1


def test_an_engine_can_be_named_by_its_process(engine: Engine, run: Run) -> None:
    assert run("stats", str(os.getpid()), "--json")[0] == 0
    status, _, err = run("stats", "severing")
    assert status == 2
    assert "did you mean 'serving'" in err


def test_recent_prints_origins_and_causes(engine: Engine, run: Run) -> None:
    runs = (
        MissedRun(8, 8, Miss(MissCause.EVICTED, "host", {"after_s": 4.5})),
        MissedRun(16, 1, Miss(MissCause.PARTIAL_BLOCK)),
    )
    engine.give_records(RequestRecord("r-1", 0.0, 17, {"device": 8}, runs))
    status, out, _ = run("recent", "-n", "5")

    assert status == 0
    for part in ("r-1", "8 device", "8 evicted (host), 1 partial_block"):
        assert part in out
    (record,) = json.loads(run("recent", "--json")[1])
    assert record["missed"][0] == {
        "first_token": 8,
        "tokens": 8,
        "cause": "evicted",
        "tier": "host",
        "detail": {"after_s": 4.5},
    }


def test_tiers_are_read_off_the_names_of_their_numbers() -> None:
    numbers = {
        "primary.held_blocks": 1.0,
        "primary.capacity_blocks": 4.0,
        "tier.1.obj.errors": 0.0,
        "tier.0.fs.indexed_blocks": 7.0,
    }
    assert list_tiers(numbers) == [(0, "fs"), (1, "obj")]
    assert read_fill(numbers) == {"host": 0.25, "fs": 7.0, "obj": None}


@pytest.mark.parametrize(
    ("age_s", "text"), [(3, "3 s"), (63, "1 min 3 s"), (3700, "1 h 1 min"), (90_000, "1 d 1 h")]
)
def test_ages_have_two_units(age_s: float, text: str) -> None:
    assert format_age(age_s) == text


def test_a_tier_is_described_with_its_fill_and_what_is_wrong() -> None:
    numbers = {
        "tier.0.fs.indexed_blocks": 30.0,
        "tier.0.fs.capacity_blocks": 1000.0,
        "tier.1.obj.breaker_open": 1.0,
        "tier.2.slab.indexed_blocks": 4.0,
        "tier.2.slab.out_of_service": 1.0,
    }
    assert describe_tiers(numbers) == [
        "fs 30 blocks, 3 % full",
        "obj, left out: breaker open",
        "slab 4 blocks, out of service",
    ]
