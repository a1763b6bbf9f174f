"""What runs in the connector for one request: nothing of a feature that is off, and no more for a longer prompt."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from tests.connector.fakes import (
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    TableManager,
    make_config,
    make_first_step,
    report_jobs,
)
from tests.tiering.drivers import make_driver

import kvtier.connector
from kvtier.base import OffloadKey, ReqContext
from kvtier.connector.load_or_compute import LoadOrCompute
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import StepOutput

CONNECTOR = Path(kvtier.connector.__file__).parent
PROMPT = list(range(17))
TABLE = [0, 1, 2, 3, 4]

MAX_FUNCTIONS = 47
"""Functions of the connector that a store and a load take. Each further one is a step on the way of every request.
Eight of them keep the record of where the prompt came from."""


class AllOrNothingManager(TableManager):
    """Holds every block, or none."""

    def __init__(self, *, is_held: bool) -> None:
        super().__init__({})
        self._is_held = is_held

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return self._is_held


@contextmanager
def counted_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count what is called in the connector, by module and function."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        # Before Python 3.12 a comprehension is a call of its own.
        if event == "call" and path.parent == CONNECTOR and not frame.f_code.co_name.startswith("<"):
            calls[path.stem, frame.f_code.co_name] += 1

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(previous)


def store_and_load(half: OffloadingConnectorScheduler) -> None:
    """Compute and store a prompt, then load it for another request."""
    first, second = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    half.get_num_new_matched_tokens(first, 0)
    step = make_first_step("a", (TABLE,), 17)
    half.update_connector_output(report_jobs(half.build_connector_meta(step)))
    half.request_finished(first)
    num_tokens, _ = half.get_num_new_matched_tokens(second, 0)
    half.update_state_after_alloc(second, FakeBlocks((TABLE,)), num_tokens or 0)
    half.update_connector_output(report_jobs(half.build_connector_meta(StepOutput())))
    half.request_finished(second)
    assert half.stats()["connector.loaded_tokens.CPU"] == 16


def test_a_store_and_a_load_take_few_functions_and_none_of_what_is_off() -> None:
    half = OffloadingConnectorScheduler(FakeSpec(make_config()))

    with counted_calls() as calls:
        store_and_load(half)

    modules = {module for module, _ in calls}
    assert len(calls) <= MAX_FUNCTIONS, sorted(calls)
    assert {"scheduler", "prefix_search", "planning", "jobs"} <= modules
    assert not modules & {"load_or_compute", "handshake"}


@pytest.mark.parametrize("is_held", [False, True])
def test_a_longer_prefix_takes_no_further_call(is_held: bool) -> None:
    def search(num_blocks: int) -> Counter[tuple[str, str]]:
        half = OffloadingConnectorScheduler(FakeSpec(make_config(), AllOrNothingManager(is_held=is_held)))
        with counted_calls() as calls:
            half.get_num_new_matched_tokens(FakeRequest("a", list(range(4 * num_blocks + 1))), 0)
        return calls

    assert search(8) == search(64)


@pytest.mark.parametrize("is_on", [False, True])
def test_an_optional_part_is_there_when_its_setting_is_on(is_on: bool) -> None:
    load_if = "faster" if is_on else "always"
    config = make_config(load_if=load_if)
    half = OffloadingConnectorScheduler(FakeSpec(config, make_driver(4).manager))

    assert isinstance(half.load_or_compute, LoadOrCompute) is is_on


def test_without_tiers_every_hit_is_loaded_so_there_is_no_choice() -> None:
    assert OffloadingConnectorScheduler(FakeSpec(make_config(load_if="faster"))).load_or_compute is None
