"""kvtier's tiers behind vLLM's real tiering manager, on real memory and real files; no model, no worker, no GPU."""

import gc
import logging
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="this vLLM has no secondary tiers")

from tests.engines.vllm.stock_engine import (
    BLOCK_BYTES,
    HAS_DOOR,
    NO_DOOR,
    AskingTier,
    StockEngine,
    key_of,
)
from tests.tiering.fs.slots import stored_blocks
from vllm.v1.kv_offload.base import Locality, LookupResult, ReqContext, TierFilter, TierMatcher
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.engines.vllm.stock_jobs import kvtier_context
from kvtier.errors import ConfigError, TierError
from kvtier.testing.clock import ManualClock
from kvtier.testing.faults import Faults
from kvtier.testing.tier_driver import HANG_GUARD_S
from kvtier.tiering.base import FAILURES_TO_OPEN
from kvtier.tiering.breaker import OPEN_S

pytestmark = pytest.mark.skipif(not HAS_DOOR, reason=NO_DOOR)

HERE = "tests.engines.vllm.stock_engine"
COMMON = {"model_identity": "main@8cde5ca8"}
"""What every tier here is told; nothing else says which weights these engines without a model run."""


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Do as vLLM's engine does when it has started, so that a collection has little to look at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fs(root: Path, **settings: object) -> dict[str, object]:
    """Return the entry of the fs tier as a user writes it."""
    common = {"type": "KVTierFS", "module_path": "kvtier.engines.vllm.tiers", "root_dir": str(root)}
    return common | {"capacity_bytes": "64MiB"} | COMMON | settings


def own(name: str, **settings: object) -> dict[str, object]:
    """Return the entry of a tier of these tests."""
    return {"type": name, "module_path": HERE} | COMMON | settings


def test_blocks_pushed_out_of_the_primary_come_back_from_the_disk_with_their_bytes(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1, 2, 3])
        engine.push_out()
        assert engine.load([1, 2, 3, 4]) == 3
        assert engine.tier.stats()["hits"] == 3


def test_a_new_engine_finds_what_the_last_one_wrote(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1, 2, 3])
    with StockEngine([fs(tmp_path)]) as engine:
        assert engine.load([1, 2, 3]) == 3


def test_two_engines_share_a_directory_while_both_run(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as writer, StockEngine([fs(tmp_path)]) as reader:
        writer.store([1, 2])
        writer.settle()
        end_s = time.monotonic() + HANG_GUARD_S
        while reader.load([1, 2]) != 2:  # a tenth of a second later
            assert time.monotonic() < end_s, "the reader does not find what the writer stores"
        assert not reader.adapter._guard.open_lookups, "answered questions are remembered for nobody"


def test_a_damaged_block_is_a_miss_and_is_written_anew(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1])
    (block,) = stored_blocks(tmp_path)
    block.flip()
    with StockEngine([fs(tmp_path)]) as engine:
        assert engine.load([1]) == 0
        assert engine.tier.stats()["damaged"] == 1
        engine.store([1])
    with StockEngine([fs(tmp_path)]) as engine:
        assert engine.load([1]) == 1


def test_one_missing_block_costs_itself_and_those_behind_it(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1, 2, 3])
        engine.push_out()
        (block,) = (block for block in stored_blocks(tmp_path) if block.name == key_of(2))
        block.write(bytes(len(block.read())))
        assert engine.load([1, 2, 3]) == 1
        assert engine.tier.stats()["hits"] == 2, "what arrived beside the missing block is loaded once"
        assert not engine.pins()


@pytest.mark.parametrize(
    "facts",
    [
        {"name": "org/other"},
        {"dtype": "fp8"},
        {"kv_cache_layout": "HND"},
        {"tp_size": 2},
        {"pp_size": 2},
        {"dcp_size": 2},
        {"tokens_per_hash": 8},
        {"replicated_layout": True},
        {"canonical_layout": True},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_another_engine_sees_none_of_the_blocks(tmp_path: Path, facts: Mapping[str, object]) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1])
    with StockEngine([fs(tmp_path)], facts=facts) as engine:
        assert engine.load([1]) == 0
    with StockEngine([fs(tmp_path)]) as engine:
        assert engine.load([1]) == 1


@pytest.mark.parametrize("settings", [{"model_identity": "main@8cde5ca8, fp8"}, {"tenant_salt": "pepper"}])
def test_what_vllm_does_not_tell_is_told_apart_by_the_user(tmp_path: Path, settings: dict[str, str]) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1])
    with StockEngine([fs(tmp_path, **settings)]) as engine:
        assert engine.load([1]) == 0


def test_a_model_without_identity_is_refused_where_the_entry_point_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model_identity=''.*let VLLM_PLUGINS name kvtier.*name the revision"
    ):
        StockEngine([fs(tmp_path, model_identity="")])
    assert stored_blocks(tmp_path) == []


def test_a_request_waits_until_host_memory_has_room_instead_of_computing(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        for first in (0, 10, 20):
            engine.store(range(first, first + 6))
            engine.push_out()
        first, second, third = (engine.new_request() for _ in range(3))
        runs = {first.req_id: range(6), second.req_id: range(10, 16), third.req_id: range(20, 26)}
        found: list[tuple[str, int]] = []
        waiting = [first, second, third]
        end_s = time.monotonic() + HANG_GUARD_S
        while waiting:
            assert time.monotonic() < end_s, "a request waits forever"
            loaded = []
            for context in list(waiting):
                num_hits = engine.search(runs[context.req_id], context)
                if num_hits is not None:
                    found.append((context.req_id, num_hits))
                    waiting.remove(context)
                    engine.read(runs[context.req_id][:num_hits], context)
                    loaded.append(context.req_id)
            engine.step(loaded)
        assert found == [(first.req_id, 6), (second.req_id, 6), (third.req_id, 6)]
        assert not engine.pins()


def test_unknown_arguments_are_ignored_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvtier")
    with StockEngine([fs(tmp_path, brand_new_in_034=True, num_thread=2)]) as engine:
        engine.store([1])
        engine.push_out()
        assert engine.load([1]) == 1
    assert "ignores brand_new_in_034=True" in caplog.text
    assert "ignores num_thread=2: did you mean 'num_threads'?" in caplog.text


def test_a_tier_of_one_s_own_needs_no_registered_name() -> None:
    with StockEngine([own("KVTierUnregistered", max_blocks=64)]) as engine:
        engine.store([1, 2])
        engine.push_out()
        assert engine.load([1, 2]) == 2


def test_a_setting_that_cannot_work_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lookup_deadline_s"):
        StockEngine([fs(tmp_path, lookup_deadline_s=-1)])
    with pytest.raises(ConfigError, match="capacity_bytes"):
        StockEngine([fs(tmp_path, capacity_bytes="1B")])
    with pytest.raises(ConfigError, match=r"cascade='on_evict'.*vLLM's own manager"):
        StockEngine([fs(tmp_path, cascade="on_evict")])


def test_after_a_reset_nothing_old_is_found_and_the_tier_goes_on(tmp_path: Path) -> None:
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1, 2])
        engine.reset()
        assert engine.load([1, 2]) == 0
        engine.store([2, 3])
        engine.push_out()
        assert engine.load([2, 3]) == 2
    with StockEngine([fs(tmp_path)]) as engine:
        assert engine.load([1, 2, 3]) == 2  # what was stored before the reset is still there for others


def test_a_reset_waits_for_transfers_in_flight() -> None:
    with StockEngine([own("KVTierExample", simulate_async=True)]) as engine:
        engine.store([1, 2])
        engine.reset()
        assert not engine.manager.has_pending_work()
        assert engine.store(range(10, 18))


def test_a_reset_stops_rather_than_give_away_rows_of_a_lost_job() -> None:
    with StockEngine([own("KVTierFaulty")]) as engine:
        engine.store([1])
        engine.faulty._due.clear()
        with pytest.raises(TierError, match="lost 1 jobs"):
            engine.manager.reset_cache()


def test_stores_may_hold_all_of_the_primary_because_a_block_is_offered_once() -> None:
    with StockEngine([own("KVTierFaulty")], num_blocks=32) as engine:
        engine.faulty.faults.delay_ratio = 1.0
        assert engine.store(range(32))
        assert not engine.store([100])
        engine.faulty.faults.delay_ratio = 0.0
        engine.settle()
        assert engine.adapter._guard.stats()["declined_cascades"] == 0
        engine.push_out(32)
        assert engine.load(range(32)) == 32


def test_a_store_that_holds_more_of_the_primary_than_it_may_is_declined() -> None:
    with StockEngine(
        [own("KVTierFaulty", max_in_flight_store_bytes=4 * BLOCK_BYTES)], num_blocks=32
    ) as engine:
        engine.faulty.faults.delay_ratio = 1.0
        engine.store([1, 2])
        engine.store([3, 4, 5, 6])
        engine.store([7])
        engine.step()
        assert [job.keys for job in engine.faulty._due] == [(key_of(1), key_of(2)), (key_of(3), key_of(4))]
        assert key_of(7) not in engine.pins()
        engine.faulty.faults.delay_ratio = 0.0
        engine.settle()
        assert engine.adapter._guard.stats()["declined_cascades"] == 3
        assert engine.adapter._guard.in_flight_store_bytes == 0
        engine.push_out(32)
        assert [engine.load([number]) for number in (2, 4, 5, 7)] == [1, 1, 0, 0]


def test_a_tier_that_fails_lies_and_raises_costs_hits_and_never_bytes() -> None:
    num_promoted = num_openings = 0.0
    for seed in range(12):
        rng, clock = random.Random(seed), ManualClock()
        with StockEngine([own("KVTierFaulty", seed=seed, clock=clock)]) as engine:
            engine.faulty.faults = Faults(
                refuse_ratio=0.1,
                fail_ratio=0.1,
                delay_ratio=0.3,
                unknown_ratio=0.1,
                repeat_ratio=0.1,
                lookup_raise_ratio=0.1,
                lose_ratio=0.1,
                claims_success=seed % 2 == 0,
            )
            for _ in range(80):
                clock.advance(rng.random() * 2)
                numbers = list(dict.fromkeys(rng.randrange(24) for _ in range(3)))
                if rng.random() < 0.5:
                    engine.store(numbers)
                else:
                    engine.load(numbers)
            engine.faulty.faults = Faults()
            engine.settle()
            assert not engine.pins()
            stats = engine.adapter._guard.stats()
            assert stats["in_flight_store_bytes"] == 0
            num_promoted += stats["promoted_blocks"]
            num_openings += stats["breaker_openings"]
    assert num_promoted > 100, "hardly anything came back from the tier: this test has shown nothing"
    assert num_openings > 0


def test_a_tier_whose_poll_raises_is_left_out_and_gives_back_its_slots() -> None:
    with StockEngine([own("KVTierFaulty")]) as engine:
        engine.store([1, 2])
        engine.faulty.faults.poll_raise_ratio = 1.0
        engine.settle()
        assert not engine.pins()
        engine.push_out()
        assert engine.load([1]) == 0


def test_a_block_that_fails_to_load_is_not_asked_for_in_every_step() -> None:
    with StockEngine([own("KVTierFaulty")]) as engine:
        engine.faulty.faults.claims_everything = True
        assert engine.load([1]) == 0
        assert engine.load([1]) == 0
        assert engine.faulty.num_submitted == 1


def test_a_load_that_is_declined_while_another_probes_the_tier_is_found_afterwards() -> None:
    clock = ManualClock()
    with StockEngine([own("KVTierFaulty", clock=clock)]) as engine:
        engine.store([1, 2])
        engine.push_out()
        engine.faulty.faults.refuse_ratio = 1.0
        for number in range(10, 10 + FAILURES_TO_OPEN):
            engine.store([number])
        assert engine.load([1]) == 0
        engine.faulty.faults.refuse_ratio = 0.0
        clock.advance(OPEN_S)
        probing, other = engine.new_request(), engine.new_request()
        engine.search([1], probing)
        engine.search([2], other)
        engine.settle()
        assert engine.search([1], probing) == 1
        assert engine.search([2], other) is None
        engine.settle()
        assert engine.search([2], other) == 1


def test_a_tier_is_asked_once_a_step_and_forgets_finished_requests() -> None:
    with StockEngine([own("KVTierAsking")]) as engine:
        engine.store([1])
        engine.push_out()
        assert engine.load([1, 2]) == 1
        assert isinstance(engine.tier, AskingTier)
        assert engine.tier.answered == {}


def test_what_is_in_use_is_renewed_in_the_tier() -> None:
    with StockEngine([own("KVTierExample")]) as engine:
        engine.store([1, 2, 3])
        engine.manager.touch([key_of(1)], engine.new_request())
        assert list(engine.example.blocks) == [key_of(2), key_of(3), key_of(1)]


def test_every_call_about_a_request_names_the_same_object() -> None:
    context = ReqContext("request", kv_transfer_params={"hint": 1})
    own_context = kvtier_context(context)
    assert kvtier_context(context) is own_context
    assert (own_context.req_id, own_context.kv_transfer_params) == ("request", {"hint": 1})


def test_a_request_waits_for_an_answer_up_to_its_deadline_and_the_tier_is_blamed(tmp_path: Path) -> None:
    clock = ManualClock()
    with StockEngine([own("KVTierFaulty", clock=clock, lookup_deadline_s=2.0)]) as engine:
        engine.faulty.faults.lookup_none_ratio = 1.0
        context = engine.new_request()
        assert engine.manager.lookup(key_of(1), context) is LookupResult.RETRY
        clock.advance(1.9)
        assert engine.manager.lookup(key_of(1), context) is LookupResult.RETRY
        clock.advance(0.1)
        assert engine.manager.lookup(key_of(1), context) is LookupResult.MISS
        assert engine.manager.lookup(key_of(2), context) is LookupResult.MISS
        assert engine.adapter._guard.stats()["overdue_requests"] == 1
        engine.manager.on_request_finished(context)
        again = engine.new_request(context.req_id)
        assert engine.manager.lookup(key_of(1), again) is LookupResult.RETRY


def test_a_request_that_has_begun_to_load_has_its_whole_time_again() -> None:
    clock = ManualClock()
    with StockEngine([own("KVTierFaulty", clock=clock, lookup_deadline_s=2.0)]) as engine:
        engine.store([1])
        engine.push_out()
        context = engine.new_request()
        engine.faulty.faults.lookup_none_ratio = 1.0
        engine.search([1], context)
        engine.faulty.faults.lookup_none_ratio = 0.0
        engine.search([1], context)
        engine.settle()
        clock.advance(5.0)
        engine.faulty.faults.lookup_none_ratio = 1.0
        assert engine.manager.lookup(key_of(2), context) is LookupResult.RETRY


def test_keys_of_a_random_seed_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    caplog.set_level(logging.ERROR, "kvtier")
    short = bytes(20)
    with StockEngine([own("KVTierFaulty")]) as engine:
        engine.faulty.faults.claims_everything = True
        context = engine.new_request()
        assert engine.manager.lookup(short, context) is LookupResult.MISS
        output = engine.manager.prepare_store([short], context)
        engine.manager.complete_store(output.keys_to_store, context)
        engine.settle()
        assert engine.faulty.num_submitted == 0
    assert "PYTHONHASHSEED=0" in caplog.text


def test_shutdown_finishes_stores_and_gives_the_memory_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm")
    engine = StockEngine([fs(tmp_path)])
    engine.store(range(8))
    assert engine.region_path().exists()
    engine.end()
    engine.adapter.shutdown()
    assert len(stored_blocks(tmp_path)) == 8
    assert "Failed to close mmap_obj" not in caplog.text
    assert not engine.region_path().exists()


def test_shutdown_says_so_when_rows_may_still_be_written() -> None:
    with StockEngine([own("KVTierFaulty")]) as engine:
        engine.faulty.faults.refuses_to_end = True
        with pytest.raises(TierError, match="its rows stay mapped"):
            engine.end()
        engine.faulty.faults.refuses_to_end = False
        engine.end()


def test_every_number_of_the_tier_has_a_family_on_the_metrics_page(tmp_path: Path) -> None:
    clock = ManualClock()
    with StockEngine([own("KVTierExample", clock=clock)]) as engine:
        engine.store([1])
        engine.settle()
        stats = engine.adapter.get_stats()
        assert stats is not None
        assert stats.reduce()["kvtier_tier_blocks:('KVTierExample',)"] == 1
        assert stats.reduce()["kvtier_tier_errors:('KVTierExample',)"] == 0
        assert engine.adapter.get_stats() is None
        clock.advance(1.0)
        assert engine.adapter.get_stats() is not None
    families = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [fs(tmp_path)]})
    assert families["kvtier_tier_blocks"].labelnames == ("tier",)
    assert families["kvtier_tier_failed_blocks"].labelnames == ("tier", "cause")
    # vLLM counts these itself.
    assert not {name for name in families if name.startswith("kvtier_tier_read")}
    assert "vllm:kv_offload_tiering_read_bytes" in families


def test_requests_that_want_no_remote_blocks_are_served_from_a_local_tier_alone(tmp_path: Path) -> None:
    local_only = TierFilter((TierMatcher(locality=Locality.LOCAL),))
    for locality, num_hits in (("LOCAL", 1), ("REMOTE", 0)):
        root = tmp_path / locality
        with StockEngine([fs(root, locality=locality)]) as engine:
            engine.store([1])
            engine.push_out()
            context = engine.new_request()
            context.load_tier_filter = local_only
            engine.search([1], context)
            engine.settle()
            assert engine.search([1], context) == num_hits
    with pytest.raises(ConfigError, match="locality"):
        StockEngine([fs(tmp_path, locality="NEARBY")])


def test_hits_count_as_disk_hits_in_vllms_statistics(tmp_path: Path) -> None:
    if not hasattr(SecondaryTierManager, "cache_hit_source"):
        pytest.skip("this vLLM does not count hits by tier (it does from 0.32 on)")
    with StockEngine([fs(tmp_path)]) as engine:
        engine.store([1])
        engine.push_out()
        context = engine.new_request()
        engine.search([1], context)
        engine.settle()
        assert engine.search([1], context) == 1
        assert engine.manager.get_load_source(key_of(1), context).name == "DISK"


def test_vllms_own_backpressure_works_beside_the_guard(tmp_path: Path) -> None:
    if not hasattr(SecondaryTierManager, "bp_detector"):
        pytest.skip("this vLLM has no backpressure (it has from 0.31 on)")
    detector = {"backpressure_cls": "EMABackpressureDetector", "warmup_completions": 1}
    limits = {"high_water_s": 0.0, "low_water_s": 0.0, "policy_cls": "DropStorePolicy"}
    with StockEngine([fs(tmp_path, backpressure=detector | limits)]) as engine:
        for number in range(3):
            engine.store([number])
            engine.settle()
        assert len(stored_blocks(tmp_path)) == 2  # one to warm up, one that is too slow
