"""Each prompt token of the embedded engine has one origin or one cause, and the origins are those of its results."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.engines.transformers.conftest import MakeEngine
from transformers import LlamaForCausalLM

from kvtier.engines.transformers.engine import KVTierEngine
from kvtier.misses import RequestRecord

PromptOf = Callable[[int, int], list[int]]
WAIT_S = 60.0


def records_of(engine: KVTierEngine) -> Sequence[RequestRecord]:
    assert engine._halves is not None
    return engine._halves.scheduler.records.latest


@pytest.mark.parametrize("load_if", ["always", "faster"])
def test_origins_and_causes_sum_to_the_prompts(
    llama: LlamaForCausalLM, prompt_of: PromptOf, make_engine: MakeEngine, tmp_path: Path, load_if: str
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": 64 * 1024, "secondary_tiers": [tier], "load_if": load_if}
    engine = make_engine(llama, num_device_blocks=14, extra_config=settings)
    results = []
    for turn in range(4):
        for seed in range(4):
            results.append(engine.run(prompt_of(seed, 40 + 8 * (seed % 2) + turn), 2))
            assert engine.drain(WAIT_S)

    records = records_of(engine)
    assert len(records) == len(results)
    for record, result in zip(records, results, strict=True):
        record.check()
        found = {origin: count for origin, count in result.sources.items() if count and origin != "computed"}
        assert dict(record.tokens_by_origin) == found
        assert record.num_missed_tokens == result.sources["computed"]
