"""Two engines in two processes share one directory of the fs tier while both are running."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.demo.served import served_turn

from kvtier.cli.demo.directory import TierDirectory
from kvtier.cli.demo.options import DevicePoolOptions, ModelOptions, SetUp
from kvtier.cli.demo.restart import serve_after_restart
from kvtier.cli.demo.serving import build_model, config_with, config_without, serve_prompt
from kvtier.engines.transformers import KVTierEngine

PROMPT = tuple(bytes(range(200)))
OTHER_PROMPT = tuple(bytes(range(199, -1, -1)))
NUM_BLOCK_TOKENS = 192
"""Tokens of the prompt's whole blocks."""


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    """Return what both processes have in common: a tiny model and a directory."""
    return SetUp(ModelOptions(None, 1, 256, 1), DevicePoolOptions(32, 2**20, "fs"), fs_settings(tmp_path))


def fs_settings(folder: Path) -> dict[str, object]:
    """Return the settings of a tier in ``folder``."""
    return {"root_dir": str(folder / "blocks"), "capacity_bytes": "1GiB"}


@pytest.fixture
def engine(set_up: SetUp) -> Iterator[KVTierEngine]:
    """Return process A's engine, running."""
    with KVTierEngine(build_model(set_up.model), config_with(set_up)) as engine:
        yield engine


@pytest.mark.slow
def test_a_running_engine_hits_what_another_process_wrote_after_it_started(
    set_up: SetUp, engine: KVTierEngine, tmp_path: Path
) -> None:
    own = serve_prompt(engine, served_turn(prompt=OTHER_PROMPT).turn, OTHER_PROMPT)
    assert engine.drain(30.0)

    others = serve_after_restart(
        set_up, TierDirectory(tmp_path), [served_turn(prompt=PROMPT), own], lambda: None
    )
    found = serve_prompt(engine, served_turn(prompt=PROMPT).turn, PROMPT)

    assert others[0].sources == {"computed": len(PROMPT)}
    assert others[1].sources["fs"] == NUM_BLOCK_TOKENS
    assert others[1].token_ids == own.token_ids
    assert found.sources["fs"] == NUM_BLOCK_TOKENS
    assert found.token_ids == others[0].token_ids == answer_without_tiers(set_up)


def answer_without_tiers(set_up: SetUp) -> tuple[int, ...]:
    """Return the right answer to the prompt."""
    with KVTierEngine(build_model(set_up.model), config_without(set_up.pools)) as engine:
        return serve_prompt(engine, served_turn(prompt=PROMPT).turn, PROMPT).token_ids
