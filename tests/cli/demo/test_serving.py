"""A turn's prompt is its conversation so far, answers included; both engines get the same device pool."""

from collections.abc import Sequence

from kvtier.cli.demo.conversation import ServedTurn, Turn
from kvtier.cli.demo.serving import (
    NUM_ANSWER_TOKENS,
    SetUp,
    choose_device_blocks,
    config_with,
    config_without,
    serve_turns,
)
from kvtier.engines.transformers import GenerationResult

SET_UP = SetUp(None, 8, 2**20, "fs", {"root_dir": "/some/where"})


class CountingEngine:
    """Answers each prompt with its length."""

    def run(
        self, token_ids: Sequence[int], max_new_tokens: int, *, do_sample: bool, eos_token_id: list[int]
    ) -> GenerationResult:
        """Answer."""
        num_tokens = len(token_ids)
        return GenerationResult("r", num_tokens, [num_tokens], {"computed": num_tokens}, 0.5, 1.0)


def test_a_prompt_is_the_conversation_so_far_and_conversations_do_not_mix() -> None:
    turns = [Turn(1, 1, (1, 1)), Turn(2, 1, (2,)), Turn(1, 2, (3,)), Turn(2, 2, (4,))]
    noted: list[ServedTurn] = []

    served = serve_turns(CountingEngine(), turns, noted.append)

    assert [one.prompt for one in served] == [(1, 1), (2,), (1, 1, 2, 3), (2, 1, 4)]
    assert [one.token_ids for one in served] == [(2,), (1,), (4,), (3,)]
    assert noted == served


def test_both_engines_have_the_same_device_pool_and_one_has_no_tier() -> None:
    with_tiers, without = config_with(SET_UP), config_without(SET_UP)

    assert without.extra_config is None
    assert with_tiers.num_device_blocks == without.num_device_blocks == 8
    assert with_tiers.block_size_tokens == without.block_size_tokens
    assert with_tiers.extra_config is not None
    assert with_tiers.extra_config["secondary_tiers"][0]["root_dir"] == "/some/where"


def test_settings_of_the_users_take_precedence() -> None:
    config = config_with(SetUp(None, 8, 2**20, "fs", {"max_in_flight_store_bytes": 5120}))

    assert config.extra_config is not None
    assert config.extra_config["secondary_tiers"][0]["max_in_flight_store_bytes"] == 5120


def test_the_pool_has_room_for_the_longest_conversation_and_little_more() -> None:
    turns = [Turn(1, 1, (1,) * 80), Turn(2, 1, (1,) * 100), Turn(1, 2, (1,) * 64)]

    assert NUM_ANSWER_TOKENS == 8
    assert choose_device_blocks(turns) == 12  # 160 tokens are 10 blocks
