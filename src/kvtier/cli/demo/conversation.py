"""The demo's conversations: documents, and questions about them turn by turn, as bytes; and what was answered.

The documents are kvtier's own pages, which a checkout has next to the package. A wheel has none; its documents are the
package's source files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).parents[2]

QUESTIONS = (
    "What does this passage promise, and to whom?",
    "Which of its words has a meaning of its own here?",
    "What would break if the opposite were done?",
    "Where would you look first when it goes wrong?",
    "What does it leave open, and who decides that?",
    "How would you explain it to a beginner?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One planned request.

    Attributes:
        conversation: which conversation, from 1.
        number: which turn of it, from 1.
        token_ids: what the turn appends to the conversation's prompt.
    """

    conversation: int
    number: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One served request.

    Attributes:
        turn: the planned turn.
        prompt: the whole prompt, the conversation so far.
        token_ids: the answer.
        sources: prompt tokens by origin: ``device``, ``host``, the type of the tier, ``computed``.
        first_token_s: time to first token.
    """

    turn: Turn
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    sources: Mapping[str, int]
    first_token_s: float

    def has_same_answer(self, other: "ServedTurn") -> bool:
        """Return whether prompt and answer equal those of ``other``. Pure."""
        return self.prompt == other.prompt and self.token_ids == other.token_ids


def read_own_documents(package_folder: Path = PACKAGE_FOLDER) -> list[bytes]:
    """Return the pages in ``docs`` of the checkout around ``package_folder``, else the package's sources, by name."""
    is_checkout = package_folder.parent.name == "src"
    pages = _read_folder(package_folder.parents[1] / "docs", "*.md") if is_checkout else []
    return pages or _read_folder(package_folder, "*.py")


def plan_conversations(
    documents: Sequence[bytes], num_conversations: int, num_turns: int, num_document_tokens: int
) -> list[Turn]:
    """Return every turn in the order of service: conversations forwards, then backwards, then forwards. Pure.

    Args:
        documents: what the conversations are about.
        num_conversations: how many there are.
        num_turns: turns of each.
        num_document_tokens: tokens of the passage with which each begins.
    """
    turns = []
    for number in range(1, num_turns + 1):
        conversations = range(1, num_conversations + 1)
        for conversation in conversations if number % 2 else reversed(conversations):
            question = QUESTIONS[(conversation + number) % len(QUESTIONS)]
            text = f"\n\nQuestion {number}: {question}\nAnswer: ".encode()
            if number == 1:
                text = make_opening(documents, conversation, num_document_tokens) + text
            turns.append(Turn(conversation, number, tuple(text)))
    return turns


def make_opening(documents: Sequence[bytes], conversation: int, num_tokens: int) -> bytes:
    """Return a heading and a passage of ``num_tokens`` tokens together; no other conversation begins with them. Pure.

    When there are more conversations than documents, later conversations continue where the earlier ones about the
    same document stopped. After a document's end the next document follows.
    """
    round_number, first = divmod(conversation - 1, len(documents))
    heading = f"Conversation {conversation}\n\n".encode()
    flow = cycle(b"".join([*documents[first:], *documents[:first]]))
    begin = round_number * num_tokens
    return (heading + bytes(islice(flow, begin, begin + num_tokens)))[:num_tokens]


def take_last_turns(served: Iterable[ServedTurn]) -> list[ServedTurn]:
    """Return the last turn of each conversation, the first conversation first. Pure."""
    return list({one.turn.conversation: one for one in served}.values())


def _read_folder(folder: Path, pattern: str) -> list[bytes]:
    texts = (path.read_bytes() for path in sorted(folder.rglob(pattern)) if path.is_file())
    return [text for text in texts if text]
