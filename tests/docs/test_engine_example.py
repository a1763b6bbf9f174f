"""The engine of examples/engine and docs/extend/engine.md finds what it has stored, and notices wrong bytes."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.fs.slots import stored_blocks

from scripts.check_docs import python_blocks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine" / "engine.py"
DOCUMENT = b"A document that is asked about more than once. " * 5
NUM_FULL_BLOCK_TOKENS = 224

Engine = Any  # Any: the class is loaded from a file that is no module of a package


@pytest.fixture(name="open_engine")
def fixture_open_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Return what builds an engine; the tests' engines share one directory, and end with the test."""
    found = importlib.util.spec_from_file_location("engine_example", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    opened: list[Engine] = []

    def build(num_blocks: int = 64) -> Engine:
        disk = {"type": "fs", "root_dir": str(tmp_path / "blocks"), "capacity_bytes": "64MiB"}
        extra_config = {"cpu_bytes_to_use": "4MiB", "secondary_tiers": [disk]}
        opened.append(module.ToyEngine(num_blocks, extra_config))
        return opened[-1]

    yield build
    for engine in opened:
        engine.shutdown()


def test_the_page_shows_the_example_as_it_is() -> None:
    blocks = [block.code for block in python_blocks(ROOT / "docs" / "extend" / "engine.md")]

    assert EXAMPLE.read_text(encoding="utf-8") in blocks


def test_what_was_stored_is_loaded_and_gives_the_same_answer(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine()

    first = engine.run(DOCUMENT, 8)
    assert engine.num_loaded_tokens == 0
    assert engine.run(DOCUMENT, 8) == first
    assert engine.num_loaded_tokens == NUM_FULL_BLOCK_TOKENS
    engine.shutdown()

    restarted = open_engine()
    assert restarted.run(DOCUMENT, 8) == first
    assert restarted.num_loaded_tokens == NUM_FULL_BLOCK_TOKENS


def test_prompts_that_take_turns_in_a_small_pool_are_answered_as_in_a_large_one(
    open_engine: Callable[..., Engine],
) -> None:
    prompts = [bytes([number]) * 100 for number in range(6)]
    roomy = open_engine()
    alone = [roomy.run(prompt, 8) for prompt in prompts]

    engine = open_engine(num_blocks=7)  # room for one prompt
    in_turns = [[engine.run(prompt, 8) for prompt in prompts] for _ in range(3)]

    assert in_turns == [alone] * 3
    assert engine.num_loaded_tokens == 96


def test_a_damaged_block_is_computed_again(open_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = open_engine()
    first = engine.run(DOCUMENT, 8)
    engine.shutdown()
    stored_blocks(tmp_path / "blocks")[0].flip()

    restarted = open_engine()

    assert restarted.run(DOCUMENT, 8) == first
    assert restarted.num_loaded_tokens < NUM_FULL_BLOCK_TOKENS


def test_a_wrong_byte_in_the_pool_would_change_the_answer(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine()
    first = engine.run(DOCUMENT, 8)
    load = engine.load

    def load_wrongly(request: Engine, num_tokens: int) -> int:
        loaded: int = load(request, num_tokens)
        engine.pages[request.block_ids[3]].neg_()
        return loaded

    engine.load = load_wrongly

    assert engine.run(DOCUMENT, 8) != first
