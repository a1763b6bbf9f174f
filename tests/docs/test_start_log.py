"""The lines of a start that docs/guide/vllm.md shows are those that the code logs now.

``scripts.start_log`` pastes them from a real engine, and ``tests/e2e/vllm/test_examples.py`` compares them with one.
"""

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.observe.control import EngineControl, describe_start
from kvtier.tiering.spec import describe_tier
from scripts.start_log import INSTANCE, PAGE, with_start_log

BLOCK_TOKENS = 128
LAYERS = ("a", "b", "c", "d")
PAGE_BYTES = len(LAYERS) * 2 * 8 * 64 * 4 * BLOCK_TOKENS
"""Of all layers: keys and values, eight heads of 64 float32 numbers, as the example's model has."""

TIER = {"type": "fs", "root_dir": "/var/cache/kvtier", "capacity_bytes": "4GiB"}


class StartedSpec(CPUOffloadingSpec):
    """Host memory that is not there, and the tier of an empty directory."""

    def describe_start(self) -> list[str]:
        found = {"tier.0.indexed_blocks": 0.0}
        return [*super().describe_start(), describe_tier(0, TIER, found, is_indexed=True)]


def test_the_page_shows_the_lines_that_the_code_logs() -> None:
    config = OffloadingConfig(
        INSTANCE,
        ModelIdentity("MODEL"),
        (KVGroup(BLOCK_TOKENS, LAYERS, PAGE_BYTES),),
        BLOCK_TOKENS,
        extra_config={"cpu_bytes_to_use": "1GiB"},
    )
    lines = describe_start(StartedSpec(config), "vLLM 0.32", EngineControl.__new__(EngineControl))
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_start_log(page, "\n".join([*lines, ""])), "run python -m scripts.start_log"
