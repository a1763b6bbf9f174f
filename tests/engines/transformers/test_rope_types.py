"""With every type of rope, tokens after a hit are those of plain ``generate``, or the request is refused."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.cache_name import CACHE_NAME
from tests.engines.transformers.architectures import (
    ORIGINAL_LENGTH,
    ROPES,
    make_gemma3,
    make_llama,
    make_phi3,
)
from tests.engines.transformers.conftest import Expected, MakeEngine, Plain, make_prompt
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtier.engines.transformers import GenerationResult, KVTierCache
from kvtier.engines.transformers.rope import LengthRange, RopeRanges, read_rope_ranges
from kvtier.errors import ModelError, SequenceLengthError

NUM_NEW_TOKENS = 8
TEXT = make_prompt(3, 140)
WITHIN, NEAR_END = 30, 50
"""Lengths of prompts whose output stays within the original length too."""
BEYOND, FAR_BEYOND = 90, 130

AssertSame = Callable[[GenerationResult, Expected], None]
MakeModel = Callable[[], PreTrainedModel]

MODELS: dict[str, MakeModel] = {f"llama, {rope}": lambda rope=rope: make_llama(rope) for rope in ROPES}  # type: ignore[misc]
MODELS |= {f"gemma-3, {rope}": lambda rope=rope: make_gemma3(rope) for rope in ROPES}  # type: ignore[misc]
MODELS["phi-3, longrope"] = make_phi3

FIXED = [name for name in MODELS if "dynamic" not in name and "longrope" not in name]
SWITCHING = [name for name in MODELS if "longrope" in name]
GROWING = [name for name in MODELS if "dynamic" in name]


def test_every_type_of_rope_of_transformers_is_tried() -> None:
    assert ROPES.keys() == ROPE_INIT_FUNCTIONS.keys() | {"default"}


@pytest.mark.parametrize("rope", sorted(ROPES.keys() - {"default"}))
def test_these_models_answer_otherwise_with_a_wrong_rope(rope: str, plain: Plain) -> None:
    model, wrong = make_llama(rope), make_llama("default")
    prompt = TEXT[:FAR_BEYOND]

    assert all(
        torch.equal(ours, other) for ours, other in zip(model.parameters(), wrong.parameters(), strict=True)
    )
    assert plain(model, prompt, NUM_NEW_TOKENS)[0] != plain(wrong, prompt, NUM_NEW_TOKENS)[0]


def hits(lengths: list[int]) -> list[tuple[int, int]]:
    """Return every pair of an earlier and a later prompt's length."""
    return [(first, second) for first in lengths for second in lengths if first != second]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(("first", "second"), hits([WITHIN, NEAR_END, FAR_BEYOND]))
def test_a_fixed_rope_shares_prefixes_of_prompts_of_any_length(
    name: str, first: int, second: int, plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model = MODELS[name]()
    engine = make_engine(model)

    engine.run(TEXT[:first], 1)
    result = engine.run(TEXT[:second], NUM_NEW_TOKENS, return_logits=True)

    assert result.num_cached_tokens == min(first, second) // 8 * 8
    assert_same(result, plain(model, TEXT[:second], NUM_NEW_TOKENS))


@pytest.mark.parametrize("name", SWITCHING)
@pytest.mark.parametrize(("first", "second"), hits([WITHIN, NEAR_END, BEYOND, FAR_BEYOND]))
def test_longrope_shares_prefixes_on_one_side_of_the_original_length(
    name: str, first: int, second: int, plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model = MODELS[name]()
    engine = make_engine(model)

    engine.run(TEXT[:first], 1)
    result = engine.run(TEXT[:second], NUM_NEW_TOKENS, return_logits=True)

    is_one_side = (first > ORIGINAL_LENGTH) == (second > ORIGINAL_LENGTH)
    assert result.num_cached_tokens == (min(first, second) // 8 * 8 if is_one_side else 0)
    assert_same(result, plain(model, TEXT[:second], NUM_NEW_TOKENS))


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize(("first", "second"), hits([WITHIN, NEAR_END]))
def test_a_dynamic_rope_shares_prefixes_below_the_original_length(
    name: str, first: int, second: int, plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model = MODELS[name]()
    engine = make_engine(model)
    # What somebody computed before with a longer prompt leaves a larger base in the model.
    plain(model, TEXT[:FAR_BEYOND], 1)

    engine.run(TEXT[:first], 1)
    result = engine.run(TEXT[:second], NUM_NEW_TOKENS, return_logits=True)

    assert result.num_cached_tokens == min(first, second) // 8 * 8
    assert_same(result, plain(model, TEXT[:second], NUM_NEW_TOKENS))


@pytest.mark.parametrize("name", GROWING)
def test_a_dynamic_rope_beyond_the_original_length_is_refused(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(MODELS[name]())
    last = ORIGINAL_LENGTH - 1

    with pytest.raises(SequenceLengthError, match=f"exceed {last} tokens.*dynamic rope.*shorten the prompt"):
        engine.generate(TEXT[:BEYOND], 1)
    with pytest.raises(SequenceLengthError, match="at most 14 new tokens"):
        engine.generate(TEXT[:NEAR_END], 15)
    with pytest.raises(SequenceLengthError, match="dynamic rope"):
        engine.cache_for(TEXT[:BEYOND])
    assert len(engine.run(TEXT[:NEAR_END], 14).tokens) == 14


@pytest.mark.parametrize("name", SWITCHING)
def test_an_answer_that_crosses_the_original_length_is_refused(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(MODELS[name]())

    with pytest.raises(
        SequenceLengthError, match="at most 15 new tokens, or give a prompt of more than 64"
    ) as caught:
        engine.generate(TEXT[:NEAR_END], 16)
    assert (caught.value.last_tokens, caught.value.rope_type) == (ORIGINAL_LENGTH, "longrope")
    assert len(engine.run(TEXT[:NEAR_END], 15).tokens) == 15


def generate(
    model: PreTrainedModel, prompt: list[int], cache: KVTierCache | None, **options: object
) -> list[int]:
    """Return the tokens of ``model.generate`` with a cache."""
    output = cast("Any", model).generate(  # Any: the annotations of transformers do not fit its models
        torch.tensor([prompt]),
        **{CACHE_NAME: cache},
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **{"max_new_tokens": NUM_NEW_TOKENS, **options},
    )
    if cache is not None:
        cache.commit(output)
    return cast("list[int]", output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", SWITCHING)
@pytest.mark.parametrize(("first", "second"), hits([WITHIN, NEAR_END, BEYOND, FAR_BEYOND]))
def test_a_cache_for_generate_keeps_to_its_side_too(
    name: str, first: int, second: int, make_engine: MakeEngine
) -> None:
    model = MODELS[name]()
    expected = generate(model, TEXT[:second], None)
    engine = make_engine(model)
    generate(model, TEXT[:first], engine.cache_for(TEXT[:first]))
    engine.run(TEXT[:first], 1)

    cache = engine.cache_for(TEXT[:second])

    is_one_side = (first > ORIGINAL_LENGTH) == (second > ORIGINAL_LENGTH)
    assert sum(cache.sources.values()) - cache.sources["computed"] == (
        min(first, second) // 8 * 8 if is_one_side else 0
    )
    assert generate(model, TEXT[:second], cache) == expected


@pytest.mark.parametrize("name", SWITCHING + GROWING)
def test_what_generate_computes_beyond_the_original_length_is_not_kept(
    name: str, plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model = MODELS[name]()
    engine = make_engine(model)
    prompt, num_tokens = TEXT[:NEAR_END], 40
    expected = generate(model, prompt, None, max_new_tokens=num_tokens)
    engine.run(prompt, 1)

    tokens = generate(model, prompt, engine.cache_for(prompt), max_new_tokens=num_tokens)

    assert tokens == expected
    assert engine.stats()["device.cached_blocks"] <= ORIGINAL_LENGTH // 8
    following = (prompt + tokens)[:55]
    result = engine.run(following, 4, return_logits=True)
    assert result.num_cached_tokens == 48
    assert_same(result, plain(model, following, 4))


def test_a_long_prompt_that_generate_computes_in_pieces_is_refused(make_engine: MakeEngine) -> None:
    model = make_llama("longrope")
    cache = make_engine(model).cache_for(TEXT[:FAR_BEYOND])

    with pytest.raises(ModelError, match=r"longrope.*prefill_chunk_size=None"):
        generate(model, TEXT[:FAR_BEYOND], cache, prefill_chunk_size=32)


def test_a_rope_of_an_unknown_type_is_refused(make_engine: MakeEngine) -> None:
    model = make_llama("default")
    rotary = next(module for module in model.modules() if hasattr(module, "rope_type"))
    cast("Any", rotary).rope_type = "spiral"  # Any: a module lets anything be set

    with pytest.raises(ModelError, match=r"rope_type='spiral'.*supported are.*linear"):
        make_engine(model)


def test_code_without_rotary_modules_of_transformers_is_taken_at_its_configuration() -> None:
    model = make_llama("default")
    for module in model.modules():
        if hasattr(module, "rope_type"):
            del cast("Any", module).rope_type  # Any: as above
    assert read_rope_ranges(model) == RopeRanges()

    model.config.rope_parameters = {"type": "su", "original_max_position_embeddings": 40}
    assert read_rope_ranges(model) == RopeRanges(frozenset({40}))

    model.config.rope_parameters = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}
    assert read_rope_ranges(model) == RopeRanges(limit=4 * ORIGINAL_LENGTH - 1)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, LengthRange(0, 10, "0 to 10", "longrope")),
        (10, LengthRange(0, 10, "0 to 10", "longrope")),
        (11, LengthRange(10, 20, "10 to 20", "longrope")),
        (21, LengthRange(20, 30, "20 to 30", "dynamic")),
    ],
)
def test_a_range_ends_where_the_next_begins(num_tokens: int, expected: LengthRange) -> None:
    assert RopeRanges(frozenset({10, 20}), 30).range_of(num_tokens) == expected
