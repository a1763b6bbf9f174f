"""A turn's prompt is its conversation so far, answers included; both engines get the same device pool."""

from collections.abc import Sequence

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.options import DevicePoolOptions, ModelOptions, SetUp
from kvtier.cli.demo.serving import config_with, config_without, serve_turns
from kvtier.engines.transformers import GenerationResult

SET_UP = SetUp(ModelOptions(None, 1, 256, 0), DevicePoolOptions(8, 2**20, "fs"), {"root_dir": "/some/where"})


class CountingEngine:
    """Answers each prompt with its length."""

    def run(self, token_ids: Sequence[int], max_new_tokens: int) -> GenerationResult:
        """Answer."""
        num_tokens = len(token_ids)
        return GenerationResult(
            "r", num_tokens, [num_tokens] * max_new_tokens, {"computed": num_tokens}, 0.5, 1.0
        )


def test_a_prompt_is_the_conversation_so_far_and_conversations_do_not_mix() -> None:
    turns = [
        Turn("", 0, 1, (1, 1), 1),
        Turn("", 1, 1, (2,), 2),
        Turn("", 0, 2, (3,), 1),
        Turn("", 1, 2, (4,), 1),
    ]

    served = serve_turns(CountingEngine(), turns, lambda: None)

    assert [one.prompt for one in served] == [(1, 1), (2,), (1, 1, 2, 3), (2, 1, 1, 4)]
    assert [one.token_ids for one in served] == [(2,), (1, 1), (4,), (4,)]


def test_progress_is_told_of_each_turn() -> None:
    told: list[None] = []

    serve_turns(CountingEngine(), [Turn("", 0, 1, (1,), 1)] * 3, lambda: told.append(None))

    assert len(told) == 3


def test_both_engines_have_the_same_device_pool_and_one_has_no_tier() -> None:
    with_tiers, without = config_with(SET_UP), config_without(SET_UP.pools)

    assert without.extra_config is None
    assert with_tiers.num_device_blocks == without.num_device_blocks
    assert with_tiers.block_size_tokens == without.block_size_tokens
    assert with_tiers.extra_config is not None
    assert with_tiers.extra_config["secondary_tiers"][0]["root_dir"] == "/some/where"
