"""Two engines in two processes share one directory of the fs tier while both are running."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.demo.conversation import ServedTurn, Turn
from kvtier.cli.demo.restart import serve_after_restart
from kvtier.cli.demo.serving import SetUp, build_model, config_with, config_without, serve_turns
from kvtier.engines.transformers import KVTierEngine
from kvtier.engines.transformers.local_model import make_random_llama

TURN = Turn(1, 1, tuple(bytes(range(200))))
OTHER_TURN = Turn(2, 1, tuple(bytes(range(199, -1, -1))))
NUM_BLOCK_TOKENS = 192
"""Tokens of the prompt's whole blocks."""


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    """Return what both processes have in common: a tiny model and a directory."""
    make_random_llama(1, 256, 1).save_pretrained(tmp_path / "model")
    tier_settings = {"root_dir": str(tmp_path / "blocks"), "capacity_bytes": "1GiB"}
    return SetUp(str(tmp_path / "model"), 32, 2**20, "fs", tier_settings)


@pytest.fixture
def engine(set_up: SetUp) -> Iterator[KVTierEngine]:
    """Return process A's engine, running."""
    with KVTierEngine(build_model(set_up.model), config_with(set_up)) as engine:
        yield engine


@pytest.mark.slow
def test_a_running_engine_hits_what_another_process_wrote_after_it_started(
    set_up: SetUp, engine: KVTierEngine
) -> None:
    own = serve(engine, OTHER_TURN)
    assert engine.drain(30.0)

    others = serve_after_restart(set_up, [TURN, OTHER_TURN], lambda _: None)
    found = serve(engine, TURN)

    assert others[0].sources == {"computed": len(TURN.token_ids)}
    assert others[1].sources["fs"] == NUM_BLOCK_TOKENS
    assert others[1].token_ids == own.token_ids
    assert found.sources["fs"] == NUM_BLOCK_TOKENS
    assert found.token_ids == others[0].token_ids == answer_without_tiers(set_up)


def serve(engine: KVTierEngine, turn: Turn) -> ServedTurn:
    """Serve one turn."""
    (served,) = serve_turns(engine, [turn], lambda _: None)
    return served


def answer_without_tiers(set_up: SetUp) -> tuple[int, ...]:
    """Return the right answer to the prompt."""
    with KVTierEngine(build_model(set_up.model), config_without(set_up)) as engine:
        return serve(engine, TURN).token_ids
