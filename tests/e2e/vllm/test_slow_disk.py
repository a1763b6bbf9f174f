"""A real engine leaves a disk alone that has become slow, comes back to it, and says what loading saves.

The clock is real. Loading and computing differ by a factor of four or more, so a busy machine changes no answer.
"""

from math import inf
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.slow_disk import HIT_TOKENS, SLOW_BYTES_PER_S, SlowDiskBench, make_options

MAX_REQUESTS = 200
NUM_TIMED = 40


def test_a_disk_of_5_mb_per_s_is_left_alone_and_used_again_when_it_has_recovered(
    llama: str, tmp_path: Path
) -> None:
    options = make_options(llama, tmp_path, load_if="faster", audit_ratio=1 / 50)
    with EngineProcess(options) as engine:
        bench = SlowDiskBench(engine)
        bench.serve_until(lambda share: share > 0.8, MAX_REQUESTS)

        bench.set_rate(SLOW_BYTES_PER_S)
        bench.serve_until(lambda share: share < 0.2, MAX_REQUESTS)
        assert engine.call("stats")["connector.not_loaded_tokens.fs"] >= HIT_TOKENS

        bench.set_rate(inf)
        bench.serve_until(lambda share: share > 0.8, MAX_REQUESTS)


@pytest.mark.parametrize("bytes_per_s", [inf, SLOW_BYTES_PER_S])
def test_the_interval_knows_whether_loading_saves_time(
    llama: str, tmp_path: Path, bytes_per_s: float
) -> None:
    options = make_options(llama, tmp_path, audit_ratio=0.4, audit_seed=3)
    with EngineProcess(options) as engine:
        bench = SlowDiskBench(engine)
        bench.set_rate(bytes_per_s)
        timed = [bench.serve() for _ in range(NUM_TIMED)]
        found = bench.saved()

    num_loaded = sum(one.is_loaded for one in timed)
    assert (found.tier, found.num_loaded, found.num_computed) == ("fs", num_loaded, NUM_TIMED - num_loaded)
    assert found.low_s > 0 if bytes_per_s == inf else found.high_s < 0
