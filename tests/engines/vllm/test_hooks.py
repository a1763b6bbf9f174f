"""The hooks in the order in which vLLM calls them, on real memory: what comes back, and how a failure is told."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.engines.vllm.configs import NUM_BLOCKS, cache_config, full, group, window, with_kvtier
from tests.engines.vllm.mini_engine import MiniEngine
from tests.engines.vllm.test_scheduler_hooks import save_adapter
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed import kv_events
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import Request

from kvtier.engines.vllm.compat import HAS_FAILED_RECVING
from kvtier.misses import MissCause
from kvtier.observe.why import explain_records

PROMPT = tuple(range(50))
"""Three full blocks of sixteen tokens, and two tokens."""

Build = Callable[..., MiniEngine]

needs_failed_recving = pytest.mark.skipif(
    not HAS_FAILED_RECVING, reason="this vLLM cannot be told which request's load failed"
)


@pytest.fixture
def build(vllm_config: VllmConfig) -> Iterator[Build]:
    """Return a function that starts an engine for KV groups, each layer with memory of its own."""
    engines: list[MiniEngine] = []

    def start(*kv_groups: KVCacheGroupSpec, has_events: bool = False, **settings: object) -> MiniEngine:
        config = with_kvtier(vllm_config, **settings)
        if has_events:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
        names = [name for kv_group in kv_groups for name in kv_group.layer_names]
        caches = {name: torch.zeros(NUM_BLOCKS, 2, 16, 16) for name in names}
        engine = MiniEngine(config, cache_config(*kv_groups), caches)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def engine(build: Build) -> MiniEngine:
    """Return an engine with one full-attention group of two layers."""
    return build(group(full(), "a", "b"))


def fill(engine: MiniEngine, blocks: Sequence[int], value: float) -> None:
    """Write numbers that differ by block into every layer's KV."""
    for position, cache in enumerate(engine.kv_caches.values()):
        for block in blocks:
            cache[block] = value + block + 0.125 * position


def pages(engine: MiniEngine, block: int) -> list[torch.Tensor]:
    """Return a copy of each layer's KV of one device block."""
    return [cache[block].clone() for cache in engine.kv_caches.values()]


def store(engine: MiniEngine, name: str = "first", tables: Sequence[Sequence[int]] = ((1, 2, 3, 4),)) -> None:
    """Compute and store the prompt's blocks."""
    fill(engine, [block for ids in tables for block in ids], 10.0)
    answers = engine.compute(engine.request(name, PROMPT), tables, len(PROMPT))
    assert answers.finished == []


def test_a_stored_prefix_comes_back_into_other_device_blocks(engine: MiniEngine) -> None:
    store(engine)
    expected = [pages(engine, block) for block in (1, 2, 3)]
    fill(engine, [0, 1, 2, 3, 4, 5], -1.0)
    bystander = pages(engine, 1)

    num_tokens, answers = engine.load(engine.request("second", PROMPT), [[4, 5, 2, 3]])

    assert num_tokens == 48
    for block, before in zip((4, 5, 2), expected, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(pages(engine, block), before, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(pages(engine, 1), bystander, strict=True))
    assert (answers.failed, answers.invalid_blocks) == (set(), set())


def test_a_load_is_reported_exactly_once(engine: MiniEngine) -> None:
    store(engine)
    begun = [engine.request(name, PROMPT[:49]) for name in ("second", "third")]

    loads = [
        engine.load(request, [[block, block + 1, block + 2, 5]])
        for request, block in zip(begun, (1, 2), strict=True)
    ]

    assert [answers.finished for _, answers in loads] == [["second"], ["third"]]


def test_the_null_block_is_neither_stored_nor_loaded(engine: MiniEngine) -> None:
    store(engine)
    fill(engine, [0], 77.0)
    before = pages(engine, 0)

    engine.load(engine.request("second", PROMPT), [[4, 5, 2, 3]])

    assert all(torch.equal(now, then) for now, then in zip(pages(engine, 0), before, strict=True))


def lose(engine: MiniEngine, name: str, tables: Sequence[Sequence[int]]) -> None:
    """Begin a load whose blocks are gone when it is to read them."""
    request = engine.request(name, PROMPT)
    num_tokens, is_async = engine.scheduler.get_num_new_matched_tokens(request, 0)
    assert (num_tokens, is_async) == (48, True)
    engine.scheduler.reset_cache()
    engine.allocate(request, tables, 48)


def test_a_failed_load_names_its_device_blocks_in_the_answer_that_ends_it(engine: MiniEngine) -> None:
    store(engine)

    lose(engine, "second", [[4, 5, 2, 3]])
    answers = engine.finish_loads(1)

    assert answers.finished == ["second"]
    assert answers.invalid_blocks == {4, 5, 2}
    assert answers.failed == set()
    assert answers.together


FRESH = ((1, 2, 3, 4), (5, 6, 7, 8))
"""Device blocks of a request that is stored, for each group; a block is one group's at a time."""

WINDOWED = {
    "one window": (lambda: [group(window(20), "w")], [[0, 9, 10, 11]]),
    "full and window": (lambda: [group(full(), "f"), group(window(20), "w")], [[1, 2, 3, 4], [0, 9, 10, 11]]),
    "two full": (lambda: [group(full(), "f"), group(full(), "g")], [[1, 2, 3, 4], [8, 9, 10, 11]]),
}


@needs_failed_recving
@pytest.mark.parametrize(("kv_groups", "tables"), WINDOWED.values(), ids=WINDOWED)
def test_a_failed_load_of_anything_else_names_the_request_and_never_blocks(
    build: Build, kv_groups: Callable[[], list[KVCacheGroupSpec]], tables: list[list[int]]
) -> None:
    """With a window vLLM would go on from the first failed block and see null blocks before it."""
    engine = build(*kv_groups())
    store(engine, tables=FRESH[: len(tables)])

    lose(engine, "second", tables)
    answers = engine.finish_loads(1)

    assert answers.finished == ["second"]
    assert answers.failed == {"second"}
    assert answers.invalid_blocks == set()
    assert answers.together


@needs_failed_recving
def test_of_a_window_only_what_vllm_has_allocated_is_loaded(build: Build) -> None:
    engine = build(group(window(20), "w"))
    store(engine)
    expected = {new: pages(engine, old) for new, old in ((4, 2), (5, 3))}
    fill(engine, [0, 1, 2, 3, 4, 5], -1.0)
    null_block = pages(engine, 0)

    num_tokens, answers = engine.load(engine.request("second", PROMPT), [[0, 4, 5, 2]])

    assert (num_tokens, answers.finished) == (48, ["second"])
    for block, before in {**expected, 0: null_block}.items():
        assert all(torch.equal(now, then) for now, then in zip(pages(engine, block), before, strict=True))


@needs_failed_recving
def test_blocks_that_left_a_window_are_not_stored_from_the_null_block(build: Build) -> None:
    engine = build(group(window(20), "w"))
    fill(engine, range(NUM_BLOCKS), 10.0)
    request = engine.request("first", PROMPT)
    request.num_computed_tokens = 48  # on the device; vLLM has put the null block in place of the first one

    engine.compute(request, [[0, 2, 3, 4]], 2)
    num_tokens, _ = engine.load(engine.request("second", PROMPT[:17]), [[5, 1]])

    assert num_tokens == 0


def test_after_a_failed_load_a_request_is_computed(engine: MiniEngine) -> None:
    store(engine)
    request = engine.request("second", PROMPT)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.scheduler.reset_cache()
    engine.allocate(request, [[4, 5, 2, 3]], 48)
    engine.finish_loads(1)
    store(engine, "third")

    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_that_is_aborted_during_its_load_is_reported_all_the_same(engine: MiniEngine) -> None:
    store(engine)
    request = engine.request("second", PROMPT)
    engine.begin_load(request, [[4, 5, 2, 3]])

    answer = engine.scheduler.request_finished_all_groups(request, ([4, 5, 2, 3],))
    answers = engine.finish_loads(1)

    assert answer == (False, None)
    assert answers.finished == ["second"]


def test_device_blocks_may_be_freed_as_soon_as_a_request_ends(engine: MiniEngine) -> None:
    store(engine)

    assert engine.scheduler.request_finished(engine.request("first", PROMPT), [1, 2, 3, 4]) == (False, None)


def test_the_engine_goes_on_stepping_until_stores_have_ended(engine: MiniEngine) -> None:
    fill(engine, [1, 2, 3, 4], 10.0)
    request = engine.request("first", PROMPT)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.step(engine.schedule(request, [[1, 2, 3, 4]], len(PROMPT)))
    is_busy = engine.scheduler.has_pending_push_work()

    engine.rest()

    assert is_busy
    assert not engine.scheduler.has_pending_push_work()


def test_a_block_that_changes_hands_is_stored_before_anything_writes_to_it(engine: MiniEngine) -> None:
    fill(engine, [1, 2, 3, 4], 10.0)
    expected = [pages(engine, block) for block in (1, 2, 3)]
    first, other = engine.request("first", PROMPT), engine.request("other", range(100, 150))
    engine.scheduler.get_num_new_matched_tokens(first, 0)
    engine.step(engine.schedule(first, [[1, 2, 3, 4]], len(PROMPT)))
    engine.scheduler.request_finished(first, [1, 2, 3, 4])

    metadata = engine.scheduler.build_connector_meta(engine.schedule(other, [[3, 2, 1, 4]], 50))
    engine.worker.handle_preemptions(metadata)
    fill(engine, [1, 2, 3, 4], -1.0)  # vLLM zeroes and computes from here on
    engine.rest()
    _, answers = engine.load(engine.request("second", PROMPT), [[5, 6, 7, 8]])

    assert answers.finished == ["second"]
    for block, before in zip((5, 6, 7), expected, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(pages(engine, block), before, strict=True))


LEFT_ALONE = {
    "must not read a prefix cache": {"skip_reading_prefix_cache": True},
    "is a session": {"resumable": True},
}


@pytest.mark.parametrize("fields", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_request_that_is_left_alone_is_neither_loaded_nor_stored(
    engine: MiniEngine, fields: dict[str, object]
) -> None:
    store(engine)
    other = tuple(range(100, 150))

    found = engine.scheduler.get_num_new_matched_tokens(engine.request("second", PROMPT, **fields), 0)
    engine.compute(engine.request("third", other, **fields), [[1, 2, 3, 4]], len(other))
    stored = engine.scheduler.get_num_new_matched_tokens(engine.request("fourth", other), 0)

    assert found == (0, False)
    assert stored == (0, False)


@pytest.mark.parametrize("fields", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_request_that_is_left_alone_has_a_record_that_says_why(
    engine: MiniEngine, fields: dict[str, object]
) -> None:
    request = engine.request("a", PROMPT, **fields)
    engine.scheduler.get_num_new_matched_tokens(request, 16)
    engine.allocate(request, [[1, 2, 3, 4]], 0)

    half = engine.scheduler._scheduler
    (record,) = half.records.latest
    record.check()
    assert record.tokens_by_origin == {"device": 16}
    assert record.missed_by_cause() == {(MissCause.LIMITED, ""): len(PROMPT) - 16}


def test_a_prompt_whose_log_probabilities_are_wanted_is_named_as_that(engine: MiniEngine) -> None:
    store(engine)
    request = engine.request("a", PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=1))
    found = engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.allocate(request, [[1, 2, 3, 4]], 0)

    records = engine.scheduler._scheduler.records.latest
    assert found == (0, False)
    assert explain_records(records[-1:]).findings[0].name == "limited:prompt_logprobs"
    assert records[-1].missed[0].num_tokens == len(PROMPT)


def test_a_request_with_trace_headers_has_a_span_beside_vllms_own(engine: MiniEngine) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    store(engine)
    request = engine.request("traced", PROMPT)
    request.trace_headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    engine.scheduler.on_new_request(request)
    engine.load(request, [[4, 5, 2, 3]])
    engine.scheduler.request_finished(request, [])

    (span,) = exporter.get_finished_spans()  # none of the request that was stored before
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == ("a" * 32, "b" * 16)
    assert (span.attributes or {})["kv_cache.request_id"] == "traced"
    assert (span.attributes or {})["kv_cache.tier_hit"] == ("host",)
    assert (span.attributes or {})["kv_cache.blocks_hit"] == 3


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    """Return an adapter that is there before the engine: name it before ``engine``."""
    return save_adapter(tmp_path / "first", 1.0)


def test_blocks_of_an_adapter_are_found_by_its_weights_and_not_by_its_name(
    adapter_folder: Path, engine: MiniEngine, tmp_path: Path
) -> None:
    first = LoRARequest("adapter", 1, str(adapter_folder))
    gone = LoRARequest("adapter", 1, str(tmp_path / "gone"))
    fill(engine, [1, 2, 3, 4], 10.0)
    wait_for(engine, engine.request("early", PROMPT, lora_request=first))
    engine.compute(engine.request("first", PROMPT, lora_request=first), [[1, 2, 3, 4]], len(PROMPT))

    def find(req_id: str, adapter: LoRARequest | None) -> tuple[int | None, bool]:
        """Search for the prompt as another request."""
        return wait_for(engine, engine.request(req_id, PROMPT, lora_request=adapter))

    assert find("second", first) == (48, True)
    assert find("third", gone) == find("fourth", None) == (0, False)
    save_adapter(adapter_folder, 2.0)
    assert find("fifth", first) == (0, False)


def test_an_adapter_that_came_after_the_engine_started_is_not_offloaded(
    engine: MiniEngine, tmp_path: Path
) -> None:
    late = LoRARequest("adapter", 1, str(save_adapter(tmp_path / "late", 1.0)))
    wait_for(engine, engine.request("first", PROMPT, lora_request=late))
    engine.compute(engine.request("second", PROMPT, lora_request=late), [[1, 2, 3, 4]], len(PROMPT))

    assert wait_for(engine, engine.request("third", PROMPT, lora_request=late)) == (0, False)


def wait_for(engine: MiniEngine, request: Request) -> tuple[int | None, bool]:
    """Search for a request until its adapter is read, as vLLM does step after step."""
    while (found := engine.scheduler.get_num_new_matched_tokens(request, 0)) == (None, False):
        pass
    return found


def test_a_load_fills_the_blocks_of_every_group(engine: MiniEngine, build: Build) -> None:
    request = engine.request("first", PROMPT)

    assert engine.scheduler.get_loaded_kv_cache_group_ids(request) == (0,)
    if HAS_FAILED_RECVING:
        both = build(group(full(), "f"), group(window(), "w"))
        assert both.scheduler.get_loaded_kv_cache_group_ids(request) == (0, 1)


def test_tokens_of_a_load_are_told_apart_by_their_tier(engine: MiniEngine) -> None:
    hit_source = pytest.importorskip(
        "vllm.v1.metrics.cache_hit_source", reason="vLLM asks for these from 0.32 on"
    )
    store(engine)
    request = engine.request("second", PROMPT)
    num_tokens = engine.begin_load(request, [[4, 5, 2, 3]])

    sources = engine.scheduler.get_external_cache_hit_sources(request, num_tokens)

    assert sources == {hit_source.CacheHitSource.HOST: 48}
    assert engine.scheduler.get_external_cache_hit_sources(engine.request("nobody", PROMPT), 0) == {}
    engine.finish_loads(1)


def test_a_reset_forgets_what_was_stored(engine: MiniEngine) -> None:
    store(engine)

    assert engine.scheduler.reset_cache() is True
    assert engine.scheduler.get_num_new_matched_tokens(engine.request("second", PROMPT), 0) == (0, False)


def test_what_the_host_tier_gains_is_published(build: Build) -> None:
    engine = build(group(full(), "a", "b"), has_events=True)
    store(engine)

    events = list(engine.scheduler.take_events())

    assert [type(event) for event in events] == [kv_events.BlockStored]
    assert (len(events[0].block_hashes), events[0].medium, events[0].block_size) == (3, "CPU", 0)
    assert list(engine.scheduler.take_events()) == []


def test_copies_of_a_worker_are_reported_with_their_bytes(engine: MiniEngine) -> None:
    store(engine)
    engine.load(engine.request("second", PROMPT), [[4, 5, 2, 3]])

    assert engine.worker.get_kv_connector_stats() is None
    half = engine.scheduler._connector.connector_scheduler
    assert half is not None
    numbers = half.stats()
    assert numbers["connector.store_bytes"] == 3 * 2 * 2048
    assert numbers["connector.load_bytes"] == 3 * 2 * 2048


def test_what_was_stored_is_loaded_into_the_kv_caches_that_come_after_a_sleep(engine: MiniEngine) -> None:
    store(engine)
    expected = [pages(engine, block) for block in (1, 2, 3)]

    engine.worker.unregister_kv_caches()
    engine.worker.unregister_kv_caches()
    for cache in engine.kv_caches.values():
        cache.zero_()  # what was in device memory does not come back
    engine.worker.restore_kv_caches()
    engine.worker.restore_kv_caches()
    _, answers = engine.load(engine.request("second", PROMPT), [[4, 5, 2, 3]])

    assert (answers.finished, answers.invalid_blocks) == (["second"], set())
    for block, before in zip((4, 5, 2), expected, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(pages(engine, block), before, strict=True))


def test_with_load_if_faster_steps_are_timed_and_hits_come_back_all_the_same(build: Build) -> None:
    engine = build(group(full(), "a", "b"), secondary_tiers=[{"type": "example"}], load_if="faster")
    for number in range(3):
        other = engine.request(f"other-{number}", [number * 50 + token for token in PROMPT])
        engine.compute(other, [[1, 2, 3, 4]], len(PROMPT))
        engine.scheduler.request_finished(other, [1, 2, 3, 4])

    num_tokens, answers = engine.load(engine.request("again", PROMPT), [[4, 5, 2, 3]])

    half = engine.scheduler._connector.connector_scheduler
    assert half is not None
    stats = half.stats()
    assert num_tokens == 48
    assert answers.failed == set()
    assert stats["connector.prefill_tokens_per_s"] > 0
    assert stats["connector.load_bytes_per_s"] > 0
