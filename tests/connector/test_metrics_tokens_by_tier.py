"""From which tier the tokens of a load come: by rule, and through the scheduler half over real tiers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    make_config,
    make_first_step,
    report_jobs,
)
from tests.tiering.drivers import make_driver

from kvtier.base import OffloadKey
from kvtier.connector.groups import GroupLayout
from kvtier.connector.planning import count_tokens_by_tier
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput

PROMPT = list(range(17))
NUM_BLOCKS = 8
FULL = GroupLayout(0, HASH_TOKENS, 1, 1, None)
WINDOW = GroupLayout(0, HASH_TOKENS, 1, 1, num_tail_tokens=6)


def key_of(group_idx: int, block: int) -> OffloadKey:
    """Return the key of one block."""
    return OffloadKey(bytes([block, group_idx]))


def make_keys(num_groups: int) -> list[list[OffloadKey]]:
    """Return the keys of a request, by group."""
    return [[key_of(group, block) for block in range(NUM_BLOCKS)] for group in range(num_groups)]


@pytest.mark.parametrize(
    ("promoted", "first_token", "num_tokens", "sources"),
    [
        ({}, 0, 16, {"CPU": 16}),
        ({0: "fs", 1: "fs"}, 0, 8, {"fs": 8}),
        ({1: "fs", 2: "obj"}, 0, 16, {"CPU": 8, "fs": 4, "obj": 4}),
        ({0: "fs", 3: "fs"}, 4, 8, {"CPU": 8}),
        ({0: "fs", 1: "obj"}, 3, 5, {"fs": 1, "obj": 4}),
        ({0: "fs", 1: "obj"}, 3, 3, {"fs": 1, "obj": 2}),
    ],
)
def test_a_token_counts_for_the_tier_of_its_block(
    promoted: dict[int, str], first_token: int, num_tokens: int, sources: dict[str, int]
) -> None:
    by_key = {key_of(0, block): tier for block, tier in promoted.items()}

    assert (
        count_tokens_by_tier([FULL], make_keys(1), by_key, first_token, first_token + num_tokens) == sources
    )


def test_a_block_that_is_entered_in_the_middle_counts_its_own_tokens_only() -> None:
    pairs = GroupLayout(0, HASH_TOKENS, 2, 2, None)
    promoted = {key_of(0, 1): "fs", key_of(0, 2): "obj"}

    assert count_tokens_by_tier([pairs], make_keys(1), promoted, 12, 24) == {"fs": 4, "obj": 8}


def test_of_several_groups_the_full_attention_group_counts_wherever_it_stands() -> None:
    layouts = [WINDOW, GroupLayout(1, HASH_TOKENS, 1, 1, None)]
    promoted = {key_of(0, 3): "obj", key_of(1, 0): "fs"}

    assert count_tokens_by_tier(layouts, make_keys(2), promoted, 0, 16) == {"CPU": 12, "fs": 4}


def test_without_full_attention_the_first_group_counts_and_only_what_it_loads() -> None:
    layouts = [WINDOW, GroupLayout(1, HASH_TOKENS, 1, 1, num_tail_tokens=6)]
    promoted = {key_of(0, 0): "obj", key_of(0, 3): "fs", key_of(1, 2): "obj"}

    assert count_tokens_by_tier(layouts, make_keys(2), promoted, 0, 16) == {"CPU": 12, "fs": 4}


@given(
    layouts=st.lists(
        st.tuples(st.sampled_from([2, 4]), st.integers(1, 3), st.sampled_from([None, 1, 6])),
        min_size=1,
        max_size=3,
    ),
    first_token=st.integers(0, 8),
    num_tokens=st.integers(1, 8),
    promoted=st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, NUM_BLOCKS - 1)), st.sampled_from(["fs", "obj"])
    ),
)
def test_sources_sum_to_the_tokens_of_the_load_and_none_is_zero(
    layouts: Sequence[tuple[int, int, int | None]],
    first_token: int,
    num_tokens: int,
    promoted: dict[tuple[int, int], str],
) -> None:
    groups = [GroupLayout(idx, tokens, factor, 1, tail) for idx, (tokens, factor, tail) in enumerate(layouts)]
    by_key = {key_of(*at): tier for at, tier in promoted.items()}

    sources = count_tokens_by_tier(
        groups, make_keys(len(groups)), by_key, first_token, first_token + num_tokens
    )

    assert sum(sources.values()) == num_tokens
    assert min(sources.values()) > 0


class Bench:
    """A scheduler half over a primary tier and an example tier that has what the primary has lost."""

    def __init__(self) -> None:
        self.driver = make_driver(num_blocks=8)
        self.half = OffloadingConnectorScheduler(FakeSpec(make_config(), self.driver.manager))

    def store(self, request: FakeRequest) -> None:
        """Compute a request and see its stores through, into the tier too."""
        self.half.get_num_new_matched_tokens(request, 0)
        step = make_first_step(request.request_id, ([0, 1, 2, 3, 4],), request.num_tokens)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(step)))
        self.half.request_finished(request)

    def store_below(self, request: FakeRequest) -> None:
        """Compute a request whose blocks are soon in the tier alone."""
        self.store(request)
        self.driver.evict_everything()

    def search(self, request: FakeRequest, num_local_tokens: int = 0) -> int:
        """Ask in every step until the answer is known."""
        for _ in range(10):
            num_tokens, _ = self.half.get_num_new_matched_tokens(request, num_local_tokens)
            if num_tokens is not None:
                return num_tokens
            self.half.build_connector_meta(StepOutput())
        raise AssertionError("the search was not answered")

    def load(self, request: FakeRequest, num_local_tokens: int = 0) -> dict[str, int]:
        """Load what can be loaded, see it through, and return where it came from."""
        num_tokens = self.search(request, num_local_tokens)
        self.half.update_state_after_alloc(request, FakeBlocks((list(range(10, 15)),)), num_tokens)
        sources = self.half.get_tokens_by_tier(request.request_id, num_tokens)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(StepOutput())))
        return sources


def test_what_was_promoted_for_a_waiting_request_counts_for_its_tier_and_the_rest_for_the_primary() -> None:
    bench = Bench()
    bench.store_below(FakeRequest("a", PROMPT))
    bench.store(FakeRequest("b", PROMPT[:9]))

    assert bench.load(FakeRequest("c", PROMPT), num_local_tokens=4) == {"CPU": 4, "example": 8}


def test_what_is_in_the_primary_when_a_request_comes_counts_for_it_whoever_brought_it_up() -> None:
    bench = Bench()
    bench.store_below(FakeRequest("a", PROMPT))

    assert bench.load(FakeRequest("b", PROMPT)) == {"example": 16}
    assert bench.load(FakeRequest("c", PROMPT)) == {"CPU": 16}


def test_a_second_load_of_a_request_has_sources_of_its_own() -> None:
    bench = Bench()
    bench.store_below(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    bench.load(request)

    assert bench.load(request) == {"CPU": 16}


def test_the_sources_of_a_request_are_forgotten_with_it() -> None:
    bench = Bench()
    bench.store_below(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    bench.load(request)

    bench.half.request_finished(request)

    assert bench.half.get_tokens_by_tier("b", 16) == {}


def test_without_tokens_there_are_no_sources() -> None:
    bench = Bench()
    bench.store_below(FakeRequest("a", PROMPT))
    bench.load(FakeRequest("b", PROMPT), num_local_tokens=6)

    assert bench.half.get_tokens_by_tier("b", 0) == {}


def test_a_manager_without_other_tiers_has_one_source() -> None:
    bench = Bench()
    bench.half = OffloadingConnectorScheduler(FakeSpec(make_config(), CPUOffloadingManager(8)))
    bench.store(FakeRequest("a", PROMPT))

    assert bench.load(FakeRequest("b", PROMPT)) == {"CPU": 16}


def test_loads_that_ended_well_are_counted_by_tier() -> None:
    bench = Bench()
    bench.store_below(FakeRequest("a", PROMPT))
    bench.store(FakeRequest("b", PROMPT[:9]))
    bench.load(FakeRequest("c", PROMPT))
    bench.load(FakeRequest("d", PROMPT))

    stats = bench.half.stats()

    assert stats["connector.loaded_tokens.CPU"] == 24
    assert stats["connector.loaded_tokens.example"] == 8


def test_tokens_of_a_failed_load_are_not_counted() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(10, 15)),)), bench.search(request))
    metadata = bench.half.build_connector_meta(StepOutput())

    bench.half.update_connector_output(report_jobs(metadata, failed=list(metadata.load_jobs)))

    assert "connector.loaded_tokens.CPU" not in bench.half.stats()


def test_a_state_brings_every_token_before_it() -> None:
    states = GroupLayout(0, 4, 1, 1, num_tail_tokens=4)
    keys = make_keys(1)
    assert count_tokens_by_tier([states], keys, {keys[0][3]: "fs"}, 4, 16) == {"fs": 12}
