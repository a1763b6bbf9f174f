"""The plan interleaves conversations that share nothing, and a plan without sense is refused."""

from itertools import pairwise

import pytest

from kvtier.cli.demo.conversation import ConversationShape, Document, make_opening, plan_conversations
from kvtier.errors import ConfigError

DOCUMENTS = [Document("a.md", b"alpha " * 50), Document("b.md", b"beta " * 10)]


def shape(num_conversations: int = 3, num_turns: int = 3, num_passage_tokens: int = 100) -> ConversationShape:
    """Return a small plan's shape."""
    return ConversationShape(num_conversations, num_turns, num_passage_tokens, num_answer_tokens=4)


def test_conversations_take_turns_forwards_and_backwards() -> None:
    turns = plan_conversations(DOCUMENTS, shape())

    assert [turn.conversation for turn in turns] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [turn.number for turn in turns] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_plan_is_the_same_each_time() -> None:
    assert plan_conversations(DOCUMENTS, shape()) == plan_conversations(DOCUMENTS, shape())


def test_only_the_first_turn_brings_the_passage() -> None:
    turns = plan_conversations(DOCUMENTS, shape())

    assert all((len(turn.token_ids) > 100) == (turn.number == 1) for turn in turns)


def test_passages_have_the_length_asked_for_and_begin_differently_within_a_block() -> None:
    passages = [make_opening(DOCUMENTS, number, 700) for number in range(12)]

    assert {len(passage) for passage in passages} == {700}
    assert all(one[:16] != other[:16] for one, other in pairwise(passages))


def test_tokens_are_bytes() -> None:
    turns = plan_conversations(DOCUMENTS, shape())

    assert all(0 <= token < 256 for turn in turns for token in turn.token_ids)


def test_a_label_names_conversation_and_turn_from_one() -> None:
    assert plan_conversations(DOCUMENTS, shape())[4].label == "2.2"


@pytest.mark.parametrize("position", range(4))
def test_a_shape_without_anything_is_refused(position: int) -> None:
    numbers = [1, 1, 1, 1]
    numbers[position] = 0

    with pytest.raises(ConfigError, match="must be at least 1"):
        ConversationShape(*numbers)
