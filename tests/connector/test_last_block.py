"""The last block of a prompt of whole blocks is loaded where the engine computes its last token again."""

from dataclasses import replace

import pytest
from tests.connector.fakes import (
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    block_ids_of,
    hash_tokens,
    make_config,
    make_first_step,
    report_jobs,
)

from kvtier.base import ReqContext, make_offload_key
from kvtier.config import GroupKind, KVGroup
from kvtier.connector.common import OffloadingConnectorMetadata
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.prefix_search import LONE_BLOCK_TOKENS, find_max_end, split_by_need
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput
from kvtier.misses import MissCause

FULL = KVGroup(4, ("layer",), 64)
PROMPT = list(range(16))


class Bench:
    """A scheduler half of an engine that computes the last token of a loaded prompt again, and its calls."""

    def __init__(self, *groups: KVGroup, computes_last_token: bool = True) -> None:
        config = make_config(1, groups or (FULL,))
        self.manager = CPUOffloadingManager(64)
        spec = FakeSpec(replace(config, computes_last_token=computes_last_token), self.manager)
        self.half = OffloadingConnectorScheduler(spec)
        self.sizes = [group.block_size_tokens for group in config.groups]
        self._next_block = 1

    def tables(self, num_tokens: int) -> tuple[list[int], ...]:
        """Return new device blocks for so many tokens of each group."""
        tables = []
        for size in self.sizes:
            num_blocks = -(-num_tokens // size)
            tables.append(list(range(self._next_block, self._next_block + num_blocks)))
            self._next_block += num_blocks
        return tuple(tables)

    def store(self, tokens: list[int]) -> None:
        """Compute a request, and see its stores through."""
        request = FakeRequest(f"of-{len(tokens)}", tokens)
        self.half.get_num_new_matched_tokens(request, 0)
        step = make_first_step(request.request_id, self.tables(len(tokens)), len(tokens))
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(step)))
        self.half.request_finished(request)

    def begin(self, request: FakeRequest, num_local: int = 0) -> OffloadingConnectorMetadata:
        """Begin a request as vLLM does, up to the start of its load."""
        found, _ = self.half.get_num_new_matched_tokens(request, num_local)
        assert found is not None
        self.half.update_state_after_alloc(request, FakeBlocks(self.tables(request.num_tokens)), found)
        return self.half.build_connector_meta(StepOutput())


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_prompt_of_whole_blocks_loads_all_of_them(num_blocks: int) -> None:
    bench = Bench()
    bench.store(PROMPT)
    prompt = PROMPT[: 4 * num_blocks]

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", prompt), 0) == (4 * num_blocks, True)
    assert bench.half.get_num_new_matched_tokens(FakeRequest("c", [*prompt, 99]), 0) == (4 * num_blocks, True)


def test_an_engine_that_does_not_say_so_has_a_token_to_compute() -> None:
    bench = Bench(computes_last_token=False)
    bench.store(PROMPT)

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (12, True)


def test_a_clients_limit_and_what_the_device_holds_count_as_before() -> None:
    bench = Bench()
    bench.store(PROMPT)
    limited = FakeRequest("b", PROMPT, {"max_load_tokens": 9})

    assert bench.half.get_num_new_matched_tokens(limited, 0) == (8, True)
    assert bench.half.get_num_new_matched_tokens(FakeRequest("c", PROMPT), 8) == (8, True)
    assert bench.half.get_num_new_matched_tokens(FakeRequest("d", PROMPT), 16) == (0, False)


def test_a_short_last_block_is_not_loaded_alone() -> None:
    bench = Bench()
    bench.store(PROMPT)
    request = FakeRequest("b", PROMPT)

    assert bench.half.get_num_new_matched_tokens(request, 12) == (0, False)

    bench.half.update_state_after_alloc(request, FakeBlocks(bench.tables(16)), 0)
    (record,) = bench.half.records.latest[-1:]
    assert dict(record.tokens_by_origin) == {"device": 12}
    assert record.missed_by_cause() == {(MissCause.PARTIAL_BLOCK, ""): 4}


@pytest.mark.parametrize("block_tokens", [LONE_BLOCK_TOKENS // 2, LONE_BLOCK_TOKENS])
def test_a_long_last_block_is_loaded_alone(block_tokens: int) -> None:
    groups = split_by_need(make_group_layouts(FakeSpec(make_config(1, (KVGroup(block_tokens, ("a",), 64),)))))
    num_tokens = 3 * block_tokens
    last_of = {
        num_local: find_max_end(groups, num_tokens, num_local)
        for num_local in (0, block_tokens, 2 * block_tokens)
    }

    is_long = block_tokens >= LONE_BLOCK_TOKENS
    assert last_of == {
        0: num_tokens,
        block_tokens: num_tokens,
        2 * block_tokens: num_tokens if is_long else num_tokens - 1,
    }


def test_the_last_token_is_computed_although_it_was_loaded_and_the_record_says_so() -> None:
    bench = Bench()
    bench.store(PROMPT)
    request = FakeRequest("b", PROMPT)

    metadata = bench.begin(request)
    bench.half.update_connector_output(report_jobs(metadata))

    (job,) = metadata.load_jobs.values()
    assert len(block_ids_of(job.transfer_spec.source)) == 4
    (record,) = bench.half.records.latest[-1:]
    assert dict(record.tokens_by_origin) == {"host": 15}
    assert record.missed_by_cause() == {(MissCause.PARTIAL_BLOCK, ""): 1}


def test_a_last_block_that_is_not_held_is_missed_for_its_own_cause() -> None:
    bench = Bench()
    bench.store(PROMPT[:12])
    bench.half.update_connector_output(report_jobs(bench.begin(FakeRequest("b", PROMPT))))

    record = bench.half.records.latest[-1]
    assert dict(record.tokens_by_origin) == {"host": 12}
    assert record.missed_by_cause() == {(MissCause.NEVER_SEEN, ""): 3, (MissCause.PARTIAL_BLOCK, ""): 1}


def test_the_block_of_the_last_token_is_fenced_and_not_stored_again() -> None:
    bench = Bench()
    bench.store(PROMPT)
    request = FakeRequest("b", PROMPT)
    metadata = bench.begin(request)
    bench.half.update_connector_output(report_jobs(metadata))
    step = make_first_step("b", bench.tables(16), 1, 15)

    assert not bench.half.build_connector_meta(step).store_jobs


@pytest.mark.parametrize(
    ("window_tokens", "num_found"),
    # The token in front of the tail of window - 1 tokens is in the tail's first block, or in one that is not loaded.
    [(6, 16), (7, 16), (8, 16), (9, 12), (5, 12), (1, 12)],
)
def test_a_window_lets_it_be_loaded_where_the_tail_has_the_token_before_it(
    window_tokens: int, num_found: int
) -> None:
    bench = Bench(FULL, KVGroup(4, ("w",), 64, GroupKind.WINDOW, window_tokens))
    bench.store(PROMPT)

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (num_found, True)


def test_a_state_after_the_last_token_cannot_be_used_to_compute_it() -> None:
    bench = Bench(FULL, KVGroup(4, ("s",), 64, GroupKind.STATE))
    keys = [make_offload_key(one, group) for one in hash_tokens(PROMPT) for group in (0, 1)]
    bench.manager.prepare_store(keys, ReqContext("a"))
    bench.manager.complete_store(keys, ReqContext("a"))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (12, True)
