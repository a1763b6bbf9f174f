"""The device pool holds the longest conversation, and one that would not is refused before anything slow."""

import pytest

from kvtier.cli.demo.command import choose_device_blocks, count_longest_tokens
from kvtier.cli.demo.conversation import Turn
from kvtier.errors import ConfigError

TURNS = [Turn("", 0, 1, (1,) * 50, 2), Turn("", 1, 1, (1,) * 90, 2), Turn("", 0, 2, (1,) * 40, 2)]


def test_a_conversation_is_as_long_as_its_turns_and_answers_together() -> None:
    assert count_longest_tokens(TURNS) == 94


def test_the_pool_has_room_for_the_longest_and_little_more() -> None:
    assert choose_device_blocks(TURNS, None) == 7


def test_a_pool_of_the_users_choice_is_taken_when_the_longest_fits() -> None:
    assert choose_device_blocks(TURNS, 6) == 6
    with pytest.raises(ConfigError, match=r"--device-blocks.*at least 6"):
        choose_device_blocks(TURNS, 5)
