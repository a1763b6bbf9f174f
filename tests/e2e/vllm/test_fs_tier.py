"""What one engine has written to disk is found by another engine beside it, and not by one of another model."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineFailedError, EngineProcess
from tests.e2e.vllm.failing_tier import TIER_NAME
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle
from tests.e2e.vllm.settings import settings_with

PROMPTS = make_cycle(4)

WAIT_S = 60.0
"""Only a guard against a hang."""

NUM_TRAINED_ROWS = 96
"""Rows of the embedding: few of the model's bytes, and some of each prompt's tokens."""


@pytest.fixture(scope="module")
def written(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which an engine that has ended has left the prompts."""
    folder = tmp_path_factory.mktemp("written") / "blocks"
    with EngineProcess(EngineOptions(llama, settings_with(folder))) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
    return folder


def wait_until_both_know(engine: EngineProcess, other: EngineProcess) -> None:
    """Return when two engines know as many blocks: they read each other's journals ten times a second."""
    end_s = time.monotonic() + WAIT_S
    known = "tier.0.fs.indexed_blocks"
    while engine.call("stats")[known] != other.call("stats")[known]:
        assert time.monotonic() < end_s, "an engine does not find what the other has stored"


def test_two_engines_with_one_key_ring_share_a_directory_while_both_run(
    llama: str, llama_controls: list[Answer], tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="pip install 'kvtier[encryption]'")
    from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring

    ring = tmp_path / "ring.json"
    write_ring(ring, add_entry(make_ring(), None, 1.0), is_new=True)
    encryption = {"key_file": str(ring)}
    options = EngineOptions(llama, settings_with(tmp_path / "blocks", encryption=encryption))
    with EngineProcess(options) as engine, EngineProcess(options) as other:
        engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
        other.call("generate_in_turn", PROMPTS[2:], GREEDY)
        engine.call("settle")
        other.call("settle")
        wait_until_both_know(engine, other)

        answers = engine.call("generate_in_turn", PROMPTS[2:], GREEDY)
        others = other.call("generate_in_turn", PROMPTS[:2], GREEDY)
        stats = engine.call("stats")

    assert_same([*others, *answers], llama_controls[:4])
    assert [answer.num_cached_tokens for answer in [*answers, *others]] == [WHOLE_TOKENS] * 4
    assert stats["connector.loaded_tokens.fs"] == 2 * WHOLE_TOKENS
    (namespace,) = (tmp_path / "blocks").glob("*/namespace.json")
    assert json.loads(namespace.read_text())["encryption"]


def test_a_tier_that_fails_every_third_load_costs_hits_and_no_answer(
    llama: str, llama_controls: list[Answer], written: Path
) -> None:
    options = EngineOptions(llama, settings_with(written, TIER_NAME))
    with EngineProcess(options) as engine:
        answers = engine.call("generate_in_turn", PROMPTS, GREEDY)
        stats = engine.call("stats")
        engine.call("check")

    assert_same(answers, llama_controls[:4])
    # A request takes one load or two, as its lookups come in.
    assert {answer.num_cached_tokens for answer in answers} == {0, WHOLE_TOKENS}
    assert stats["failed_promotions"] > 0


def test_a_reset_is_complete_on_disk_too(llama: str, llama_controls: list[Answer], tmp_path: Path) -> None:
    with EngineProcess(EngineOptions(llama, settings_with(tmp_path / "blocks"))) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
        assert engine.call("reset")

        computed = engine.call("generate_in_turn", PROMPTS, GREEDY)
        assert engine.call("forget_device")
        found = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("check")

    assert_same(computed, llama_controls[:4])
    assert_same(found, llama_controls[:4])
    assert [answer.num_cached_tokens for answer in computed] == [0] * 4
    assert [answer.num_cached_tokens for answer in found] == [WHOLE_TOKENS] * 4


def test_another_model_never_finds_these_blocks(other_llama: str, written: Path) -> None:
    with EngineProcess(EngineOptions(other_llama, settings_with(written))) as engine:
        (answer,) = engine.call("generate_in_turn", PROMPTS[:1], GREEDY)

    assert answer.num_cached_tokens == 0


def test_a_model_whose_last_rows_were_trained_further_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    from tests.e2e.vllm.checkpoints import save_llama, train_last_rows

    model = save_llama(tmp_path / "model")
    options = EngineOptions(str(model), settings_with(tmp_path / "blocks"))
    with EngineProcess(options) as engine:
        old = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")

    train_last_rows(model, NUM_TRAINED_ROWS)
    with EngineProcess(EngineOptions(str(model))) as engine:
        expected = engine.call("generate_in_turn", PROMPTS, GREEDY)
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
    with EngineProcess(options) as engine:
        second = engine.call("generate_in_turn", PROMPTS, GREEDY)

    assert_clearly_other(old, expected)
    assert_same(first, expected)
    assert_same(second, expected)
    assert [answer.num_cached_tokens for answer in first] == [0] * 4
    assert [answer.num_cached_tokens for answer in second] == [WHOLE_TOKENS] * 4


def test_a_second_engine_with_the_same_instance_id_is_refused(llama: str, tmp_path: Path) -> None:
    options = EngineOptions(llama, settings_with(tmp_path / "blocks", instance_id="the-only-one"))
    with EngineProcess(options), pytest.raises(EngineFailedError, match="the-only-one"):
        EngineProcess(options).__enter__()
