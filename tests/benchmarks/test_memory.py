"""The memory suite moves every block there and back, with LMCache beside it where there is one."""

import pytest
import torch
from tests.benchmarks.fake_lmcache import FakeLMCache

from benchmarks import memory
from benchmarks.harness import lmcache_local
from benchmarks.harness.measurement import FLOOR, OURS
from benchmarks.harness.rounds import fixed
from benchmarks.harness.tier_jobs import make_keys

BLOCK_BYTES = 4096


def test_what_was_put_into_the_primary_tier_is_what_is_got() -> None:
    device = torch.randint(-128, 128, (16, BLOCK_BYTES), dtype=torch.int8)
    before = device.clone()
    sources, targets = [9, 3, 0, 14], [1, 15, 8, 2]
    primary = memory.Primary(device, sources, targets)
    try:
        for generation in range(3):
            device[targets] = 0
            rates = primary.run(make_keys(len(sources), generation))

            assert min(rates["put"], rates["get"]) > 0
            assert torch.equal(device[targets], before[sources])
            assert torch.equal(device[sources], before[sources])
    finally:
        primary.close()


@pytest.mark.parametrize("has_lmcache", [True, False])
def test_those_take_part_that_are_there(has_lmcache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLMCache().install(monkeypatch)
    monkeypatch.setattr(memory, "TOTAL_BYTES", 8 * BLOCK_BYTES)

    measured = list(memory.measure_size(BLOCK_BYTES, fixed(1), has_lmcache=has_lmcache))

    contestants = {OURS, FLOOR} | ({lmcache_local.CPU_NAME} if has_lmcache else set())
    assert [one.labels["operation"] for one in measured] == ["put", "get"]
    assert all(set(one.values) == contestants for one in measured)
    assert all(len(one.values[OURS]) == len(contestants) for one in measured), "each begins once"
