"""Engines share what they lend, with other processes too; processes end cleanly."""

import subprocess
import sys

import pytest
from tests.tiering.mooncake.conftest import StartTier
from tests.tiering.mooncake.live import HANG_GUARD_S, LiveStore

pytestmark = pytest.mark.servers

READER = """
import dataclasses
import sys
from kvtier.testing.tier_suite import TierDriver, content_of, make_config, make_rows
from kvtier.tiering.mooncake import MooncakeTier
rows = make_rows()
config = dataclasses.replace(make_config("model-a"), extra_config={"tenant_salt": sys.argv[2]})
tier = MooncakeTier(config, rows, master=sys.argv[1], segment_bytes="16MiB", allow_any_interface=True)
driver = TierDriver(tier, rows)
assert driver.lookup(1)
assert driver.load([1]).success
assert bytes(driver.rows[0]) == bytes(content_of(1))
assert driver.store([5]).success
try:
    __import__("os").kill(__import__("os").getpid(), __import__("signal").SIGINT)
    __import__("select").select([], [], [], 10)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_blocks_in_memory_that_an_engine_lent_leave_with_it(start_tier: StartTier) -> None:
    store = LiveStore(num_providers=0)
    try:
        lender, reader = start_tier(store, segment_bytes="16MiB", allow_any_interface=True), start_tier(store)
        assert not lender.lookup(1)  # the first question joins the store
        assert reader.store([1]).success
        assert lender.load_right([1]) == reader.load_right([1]) == {1}
        assert lender.tier.shutdown(HANG_GUARD_S)
        assert not reader.load([1]).success
        result = reader.store([2])
        assert not result.success
        assert not result.is_fault
    finally:
        store.close()


def test_another_process_finds_the_blocks_and_ends_cleanly_without_a_shutdown(
    shared_store: LiveStore, start_tier: StartTier, salt: str
) -> None:
    assert start_tier(shared_store).store([1]).success
    command = [sys.executable, "-c", READER, shared_store.address, salt]
    ended = subprocess.run(
        command,
        env={"PYTHONPATH": "src:."},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "interrupted\n"


def test_the_library_is_quiet_while_all_is_well(shared_store: LiveStore, salt: str) -> None:
    script = READER.replace("assert driver.lookup(1)\n", "assert driver.store([1]).success\n")
    command = [sys.executable, "-c", script, shared_store.address, salt]
    ended = subprocess.run(
        command,
        env={"PYTHONPATH": "src:."},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert len(ended.stderr.splitlines()) <= 3, ended.stderr
