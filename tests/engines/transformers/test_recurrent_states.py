"""Models with recurrent states go on from the states after a prefix, wherever these come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cache_name import CACHE_NAME
from tests.engines.transformers.recurrent_models import MAKERS
from tests.engines.transformers.test_engine_faults import FailingSpec, tamper_with_loads
from tests.tiering.fs.slots import StoredBlock, stored_blocks
from transformers import PreTrainedModel

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.config import OffloadingConfig
from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.engines.transformers.model_adapter import find_cache_name
from kvtier.engines.transformers.paged_cache import PagedKVCache
from kvtier.errors import ModelError

INTERVAL = 16
"""Two blocks of eight tokens."""

WAIT_S = 30.0
NUM_NEW_TOKENS = 12
TOLERANCE = 2e-4
"""Largest difference of a float32 logit, against a spread of about 1. Measured: 2e-5."""

HOST = {"cpu_bytes_to_use": "16MiB"}

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
Settings = dict[str, Any]  # Any: what a user writes as JSON

_MODELS: dict[str, PreTrainedModel] = {}


@pytest.fixture
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model by its name, made once."""
    name = request.param
    if name not in _MODELS:
        _MODELS[name] = MAKERS[name]()
    return _MODELS[name]


each_model = pytest.mark.parametrize("model", MAKERS, indirect=True)
one_of_each_kind = pytest.mark.parametrize("model", ["qwen3_next", "mamba2"], indirect=True)
one_model = pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"}
    return HOST | {"secondary_tiers": [tier]}


@pytest.fixture
def start(make_engine: MakeEngine) -> MakeEngine:
    """Build an engine that keeps states every two blocks."""

    def make(model: PreTrainedModel, num_device_blocks: int = 40, **options: object) -> KVTierEngine:
        return make_engine(model, num_device_blocks, **({"state_interval_tokens": INTERVAL} | options))

    return make


def assert_same(result: GenerationResult, expected: Expected) -> None:
    assert result.logits is not None
    assert float((result.logits - expected[1][: len(result.logits)]).abs().max()) < TOLERANCE
    assert result.tokens == expected[0]


def run(engine: KVTierEngine, prompt: list[int]) -> GenerationResult:
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    engine._device.pool.check()
    return result


@pytest.mark.slow
@each_model
def test_answers_are_those_of_plain_generate_from_every_tier(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine, settings: Settings
) -> None:
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = start(model, extra_config=settings)
    for sources in ({"computed": 75}, {"device": 64, "computed": 11}):
        result = run(engine, prompt)
        assert result.sources == sources
        assert_same(result, expected)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    result = run(engine, prompt)
    assert result.sources == {"host": 64, "computed": 11}
    assert_same(result, expected)
    engine.shutdown()
    result = run(start(model, extra_config=settings), prompt)
    assert result.sources == {"fs": 64, "computed": 11}
    assert_same(result, expected)


@one_of_each_kind
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40, 49])
def test_prefixes_are_shared_up_to_the_last_state_before_the_last_token(
    model: PreTrainedModel, plain: Plain, start: MakeEngine, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(3, num_tokens)
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = start(model, extra_config=HOST)
    held = (num_tokens - 1) // INTERVAL * INTERVAL
    for origin in ("computed", "device", "host"):
        if origin == "host":
            assert engine.drain(WAIT_S)
            engine.drop_device_cache()
        result = run(engine, prompt)
        found = 0 if origin == "computed" else held
        assert {name: num for name, num in result.sources.items() if num} == {
            name: num for name, num in ((origin, found), ("computed", num_tokens - found)) if num
        }
        assert_same(result, expected)


@pytest.mark.parametrize("model", [name for name in MAKERS if name != "jamba"], indirect=True)
def test_another_prompt_goes_on_from_the_states_that_both_share(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine, prompt_of: PromptOf
) -> None:
    engine = start(model, extra_config=HOST)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    other = prompt[:40] + prompt_of(9, 30)
    result = run(engine, other)
    assert result.sources == {"host": 32, "computed": 38}
    assert_same(result, plain(model, other, NUM_NEW_TOKENS))


@one_of_each_kind
def test_answers_are_found_as_prefixes_of_the_next_turn(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine, prompt_of: PromptOf
) -> None:
    engine = start(model, extra_config=HOST)
    answer = engine.run(prompt, 30).tokens
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    following = prompt + answer + prompt_of(5, 7)
    result = run(engine, following)
    assert result.sources == {"host": 96, "computed": 16}
    assert_same(result, plain(model, following, NUM_NEW_TOKENS))


@pytest.mark.slow
@one_of_each_kind
def test_other_prompts_push_a_prefix_out_of_the_device_and_it_comes_from_the_host(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine, prompt_of: PromptOf
) -> None:
    engine = start(model, num_device_blocks=14, extra_config=HOST)
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    assert_same(run(engine, prompt), expected)
    for seed in range(20, 28):
        run(engine, prompt_of(seed, 75))
    assert engine.drain(WAIT_S)
    result = run(engine, prompt)
    assert result.sources.get("host", 0) + result.sources.get("device", 0) == 64
    assert result.sources["host"] > 0
    assert_same(result, expected)


@one_of_each_kind
@pytest.mark.parametrize("chunk_tokens", [5, 24, 512])
def test_chunks_of_a_prompt_end_where_states_are_kept(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine, chunk_tokens: int
) -> None:
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = start(model, prefill_chunk_tokens=chunk_tokens)
    assert_same(run(engine, prompt), expected)
    result = run(engine, prompt)
    assert result.sources == {"device": 64, "computed": 11}
    assert_same(result, expected)


@one_of_each_kind
def test_one_state_is_loaded_however_long_the_prefix(
    model: PreTrainedModel, prompt: list[int], start: MakeEngine
) -> None:
    engine = start(model, extra_config=HOST)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    engine.run(prompt, 1)
    shape = engine._server.adapter.shape
    assert engine.stats()["connector.load_bytes"] == 64 * shape.token_bytes + shape.state_bytes


@one_of_each_kind
def test_a_stream_that_ends_early_leaves_good_states(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine
) -> None:
    engine = start(model, extra_config=HOST)
    stream = engine.generate(prompt, 30)
    next(stream)
    stream.close()
    engine._device.pool.check()
    assert engine._device.pool.num_free_blocks == engine._device.pool.num_blocks
    assert_same(run(engine, prompt), plain(model, prompt, NUM_NEW_TOKENS))


@one_of_each_kind
@pytest.mark.parametrize("fault", ["raises", "fails"])
def test_a_failed_load_is_computed_from_what_the_device_has(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine, fault: str
) -> None:
    specs: list[FailingSpec] = []

    def make_spec(config: OffloadingConfig) -> FailingSpec:
        specs.append(FailingSpec(config))
        return specs[-1]

    engine = start(model, extra_config=HOST, make_spec=make_spec)
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    engine.run(prompt[:20], 1)
    specs[-1].loads.fault = fault
    engine.drop_device_cache()
    result = run(engine, prompt)
    assert result.sources == {"computed": 75}
    assert result.num_failed_load_blocks > 0
    assert_same(result, expected)
    # Now the device has two blocks and a state; a load behind them fails, and the request goes on from there.
    engine.drop_device_cache()
    specs[-1].loads.fault = ""
    engine.run(prompt[:20], 1)
    specs[-1].loads.fault = fault
    result = run(engine, prompt)
    assert result.sources == {"device": 16, "computed": 59}
    assert_same(result, expected)


@one_of_each_kind
def test_a_reset_engine_computes_anew(
    model: PreTrainedModel, prompt: list[int], plain: Plain, start: MakeEngine
) -> None:
    engine = start(model, extra_config=HOST)
    engine.run(prompt, 1)
    engine.reset()
    result = run(engine, prompt)
    assert result.sources == {"computed": 75}
    assert_same(result, plain(model, prompt, NUM_NEW_TOKENS))


def flip_one_byte(pages: PagedKVCache, block_id: int) -> None:
    """Change the exponent of a large number, in float32; of a convolution's inputs the latest matters surely."""
    newest = pages._state_pages[0][block_id][..., -1]
    where = torch.unravel_index(newest.abs().argmax(), newest.shape)
    newest[where] = (newest[where].view(torch.int32) ^ (1 << 25)).view(torch.float32)


def zero_page(pages: PagedKVCache, block_id: int) -> None:
    pages.pages[block_id].zero_()


@each_model
@pytest.mark.parametrize("tamper", [flip_one_byte, zero_page])
def test_a_wrong_state_is_seen_in_the_answer(
    model: PreTrainedModel,
    prompt: list[int],
    plain: Plain,
    start: MakeEngine,
    tamper: Callable[[PagedKVCache, int], None],
) -> None:
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = start(model, extra_config=HOST)
    engine.run(prompt[:66], 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    tamper_with_loads(engine, lambda request: tamper(engine._device.pages, request.state_block_ids[-1]))
    result = run(engine, prompt)
    assert result.sources == {"host": 64, "computed": 11}
    assert result.logits is not None
    assert float((result.logits[0] - expected[1][0]).abs().max()) > 10 * TOLERANCE


def blocks_of_group(root: Path, group_idx: int) -> list[StoredBlock]:
    """Return the stored blocks of one KV group; of a model that has attention too, states are the second."""
    return [one for one in stored_blocks(root) if get_offload_group_idx(OffloadKey(one.name)) == group_idx]


@one_model
@pytest.mark.parametrize("damage", ["torn", "of another kind", "swapped"])
def test_a_damaged_or_foreign_state_on_the_disk_is_a_miss(
    model: PreTrainedModel,
    prompt: list[int],
    plain: Plain,
    start: MakeEngine,
    settings: Settings,
    tmp_path: Path,
    damage: str,
) -> None:
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = start(model, extra_config=settings)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.shutdown()
    blocks = blocks_of_group(tmp_path / "fs", 1)
    assert len(blocks) == 4
    contents = [block.read() for block in blocks]
    other = blocks_of_group(tmp_path / "fs", 0)[0].read()
    for index, block in enumerate(blocks):
        half = len(contents[index]) // 2
        block.write(
            {
                "torn": contents[index][:half] + bytes(len(contents[index]) - half),
                "of another kind": other,
                "swapped": contents[index - 1],
            }[damage]
        )
    result = run(start(model, extra_config=settings), prompt)
    assert result.sources == {"computed": 75}
    assert_same(result, expected)


@one_model
def test_attention_without_its_state_is_computed_from_an_earlier_state(
    model: PreTrainedModel,
    prompt: list[int],
    plain: Plain,
    start: MakeEngine,
    settings: Settings,
    tmp_path: Path,
) -> None:
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    first = start(model, extra_config=settings)
    first.run(prompt[:34], 1)
    assert first.drain(WAIT_S)
    earlier = {block.name for block in blocks_of_group(tmp_path / "fs", 1)}
    first.run(prompt, 1)
    assert first.drain(WAIT_S)
    first.shutdown()
    for block in blocks_of_group(tmp_path / "fs", 1):
        if block.name not in earlier:
            block.flip()
    result = run(start(model, extra_config=settings), prompt)
    assert result.sources == {"fs": 32, "computed": 43}
    assert_same(result, expected)


@pytest.mark.parametrize("model", ["qwen3_next", "falcon_h1", "lfm2"], indirect=True)
def test_plain_generate_goes_on_from_a_cache_with_states(
    model: PreTrainedModel, prompt: list[int], start: MakeEngine
) -> None:
    engine = start(model, extra_config=HOST)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_NEW_TOKENS, "do_sample": False}
    generate: Any = model.generate  # Any: the annotations of transformers do not fit its models
    expected = generate(ids, pad_token_id=0, **options)
    for sources in ({"computed": 75}, {"device": 64, "computed": 11}):
        cache = engine.cache_for(ids)
        assert cache.sources == sources
        output = generate(ids, **{CACHE_NAME: cache}, pad_token_id=0, **options)
        assert torch.equal(output, expected)
        assert cache.commit(output) == 64
    cache = engine.cache_for(ids)
    engine.reset()
    assert cache.commit() == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_a_model_that_goes_on_by_token_keeps_the_last_state_of_a_prompt_computed_at_once(
    model: PreTrainedModel,
    prompt: list[int],
    plain: Plain,
    start: MakeEngine,
    prompt_of: PromptOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(model, extra_config=HOST)
    assert "one token at a time" in caplog.text
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    for other, sources in (
        (prompt[:40] + prompt_of(9, 30), {"computed": 70}),
        (prompt[:66] + prompt_of(9, 30), {"host": 64, "computed": 32}),
    ):
        result = run(engine, other)
        assert {name: num for name, num in result.sources.items() if num} == sources
        assert_same(result, plain(model, other, NUM_NEW_TOKENS))
    ids = torch.tensor([prompt])
    generate: Any = model.generate  # Any: the annotations of transformers do not fit its models
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    for length in (75, 40):
        cut = ids[:, :length]
        options["attention_mask"] = torch.ones_like(cut)
        found = generate(cut, **{CACHE_NAME: engine.cache_for(cut)}, **options)
        assert torch.equal(found, generate(cut, **options))


def test_generate_of_a_model_with_states_alone_takes_no_cache(start: MakeEngine, prompt: list[int]) -> None:
    engine = start(MAKERS["mamba2"]())
    with pytest.raises(ModelError, match=r"call engine\.generate or engine\.run"):
        engine.cache_for(prompt)


def forget_the_first_state(module: PreTrainedModel, _args: object, kwargs: dict[str, Any]) -> None:
    """Empty the first layer's state before a pass, as if a part of it were kept elsewhere and lost."""
    state = kwargs[find_cache_name(module)].layers[0].recurrent_states[0]
    if state is not None:
        state.zero_()


def test_a_model_that_cannot_go_on_from_its_states_is_refused(start: MakeEngine) -> None:
    model = MAKERS["mamba2"]()
    torch.nn.Module.register_forward_pre_hook(model, forget_the_first_state, with_kwargs=True)
    with pytest.raises(ModelError, match="cannot go on from its recurrent states"):
        start(model)
