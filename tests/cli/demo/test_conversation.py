"""Conversations share nothing and take turns; their documents come from a checkout, or from the package."""

from itertools import pairwise
from pathlib import Path

from tests.cli.demo.served import served_turn

from kvtier.cli.demo.conversation import (
    make_opening,
    plan_conversations,
    read_own_documents,
    take_last_turns,
)

DOCUMENTS = [b"alpha " * 50, b"beta " * 10]


def write(path: Path, text: str) -> Path:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_conversations_take_turns_forwards_and_backwards() -> None:
    turns = plan_conversations(DOCUMENTS, 3, 3, 100)

    assert [turn.conversation for turn in turns] == [1, 2, 3, 3, 2, 1, 1, 2, 3]
    assert [turn.number for turn in turns] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_plan_is_the_same_each_time() -> None:
    assert plan_conversations(DOCUMENTS, 3, 3, 100) == plan_conversations(DOCUMENTS, 3, 3, 100)


def test_only_the_first_turn_brings_the_passage() -> None:
    turns = plan_conversations(DOCUMENTS, 3, 3, 100)

    assert all((len(turn.token_ids) > 100) == (turn.number == 1) for turn in turns)


def test_passages_have_the_length_asked_for_and_begin_differently_within_a_block() -> None:
    passages = [make_opening(DOCUMENTS, number, 700) for number in range(1, 13)]

    assert {len(passage) for passage in passages} == {700}
    assert all(one[:16] != other[:16] for one, other in pairwise(passages))


def test_a_later_conversation_about_a_document_goes_on_where_the_earlier_one_stopped() -> None:
    first, third = (make_opening([b"abcdefgh" * 100], number, 20) for number in (1, 2))

    assert (first, third) == (b"Conversation 1\n\nabcd", b"Conversation 2\n\nefgh")


def test_tokens_are_bytes() -> None:
    turns = plan_conversations(DOCUMENTS, 3, 3, 100)

    assert all(0 <= token < 256 for turn in turns for token in turn.token_ids)


def test_the_last_turn_of_each_conversation_is_taken_in_their_order() -> None:
    served = [served_turn(conversation, 1) for conversation in (1, 2, 3)]
    served += [served_turn(conversation, 2) for conversation in (3, 2, 1)]

    last = take_last_turns(served)

    assert [(one.turn.conversation, one.turn.number) for one in last] == [(1, 2), (2, 2), (3, 2)]


def test_a_checkout_gives_its_pages_by_name_without_empty_ones(tmp_path: Path) -> None:
    package = write(tmp_path / "src" / "kvtier" / "base.py", "'''code'''").parent
    write(tmp_path / "docs" / "b.md", "second")
    write(tmp_path / "docs" / "a" / "x.md", "first")
    write(tmp_path / "docs" / "c.md", "")
    write(tmp_path / "docs" / "d.png", "no text")

    assert read_own_documents(package) == [b"first", b"second"]


def test_a_wheel_gives_its_sources_even_with_other_docs_around(tmp_path: Path) -> None:
    package = write(tmp_path / "lib" / "site-packages" / "kvtier" / "base.py", "'''code'''").parent
    write(tmp_path / "lib" / "docs" / "page.md", "another project's page")

    assert read_own_documents(package) == [b"'''code'''"]


def test_the_installed_package_has_documents_of_its_own() -> None:
    assert sum(map(len, read_own_documents())) > 5_000
