"""One engine stores a prompt in a directory, and another with one change finds what both have in common, no more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("xxhash", reason="needs the fs tier: pip install 'kvtier[fs]'")

from tests.engines.transformers.identity_changes import BLOCK_TOKENS, UNCHANGED, Side, list_changes

from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.errors import SequenceLengthError

WAIT_S = 60.0
CHANGES = {change.name: change for change in list_changes()}

QUICK = (
    "one bit of one weight in the last layer",
    "attention computed by another backend",
    "tenant, none before",
    "after a reset",
    "a token of the third block",
    "a new process with the same settings",
    "the model's name",
)


def test_there_are_at_least_forty_changes_and_each_has_a_name_of_its_own() -> None:
    changes = list_changes()
    assert len(changes) == len(CHANGES)
    assert sum(change.group != UNCHANGED for change in changes) >= 40


@pytest.mark.parametrize("name", QUICK)
def test_an_engine_finds_what_it_has_in_common_with_the_other_one_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    require_separation(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CHANGES) - set(QUICK)))
def test_the_same_holds_after_every_other_change(name: str, tmp_path: Path) -> None:
    require_separation(name, tmp_path)


def require_separation(name: str, folder: Path) -> None:
    change = CHANGES[name]
    first, second = change.sides()
    with serving(first, folder) as engine:
        engine.run(list(first.prompt), 1)
        engine.drain(WAIT_S)
    with serving(second, folder) as engine:
        if second.is_reset:
            engine.reset()
        num_found = look_for(engine, second)
    # Of a prompt that is held whole the engine computes the last token again.
    assert num_found == min(change.num_shared_blocks * BLOCK_TOKENS, len(second.prompt) - 1)


def look_for(engine: KVTierEngine, side: Side) -> int:
    """Return how many tokens of the prompt the engine loads from the tier; none of a prompt that it refuses."""
    try:
        return engine.run(list(side.prompt), 1).sources.get("fs", 0)
    except SequenceLengthError:
        return 0


@contextmanager
def serving(side: Side, folder: Path) -> Iterator[KVTierEngine]:
    """Serve a side's model with a tier in ``folder``."""
    version = side.layout_version
    changed = (
        mock.patch("kvtier.namespace.LAYOUT_VERSION", version) if version is not None else mock.MagicMock()
    )
    with changed:
        engine = KVTierEngine(side.model, engine_config(side, folder))
    try:
        yield engine
    finally:
        engine.shutdown()


def engine_config(side: Side, folder: Path) -> EngineConfig:
    """Return the settings of a side's engine."""
    tier = {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "8MiB", "secondary_tiers": [tier], **side.settings}
    engine = {"num_device_blocks": 32, "block_size_tokens": BLOCK_TOKENS, "model_name": "tiny", **side.engine}
    return EngineConfig(extra_config=settings, **engine)
