"""Plans conversations about documents: which turn comes when, and what each adds to its prompt.

It serves nothing and knows no model; tokens are bytes. Every conversation begins with a passage of its own, and a
turn's prompt is the whole conversation so far. Conversations take turns forwards and backwards (A B C, C B A, A B
C): one that comes back at once is still on the device, a later one is in host memory, a late one only in the tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from kvtier.cli.demo.documents import Document
from kvtier.cli.demo.options import require_at_least

QUESTIONS = (
    "What does this passage promise, and to whom?",
    "Which of its words has a meaning of its own here?",
    "What would break if the opposite were done?",
    "Where would you look first when it goes wrong?",
    "What does it leave open, and who decides that?",
    "How would you explain it to somebody new?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        label: its name in tables.
        conversation: which conversation, from 0.
        number: which turn of it, from 1.
        token_ids: what the turn appends to the conversation's prompt.
        num_answer_tokens: tokens to generate.
    """

    label: str
    conversation: int
    number: int
    token_ids: tuple[int, ...]
    num_answer_tokens: int


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """How many conversations there are and how long they get.

    Attributes:
        num_conversations: conversations.
        num_turns: turns of each.
        num_passage_tokens: tokens of the passage that each is about.
        num_answer_tokens: tokens generated in each turn.
    """

    num_conversations: int
    num_turns: int
    num_passage_tokens: int
    num_answer_tokens: int

    def __post_init__(self) -> None:
        require_at_least("--conversations", self.num_conversations, 1)
        require_at_least("--turns", self.num_turns, 1)
        require_at_least("--document-tokens", self.num_passage_tokens, 1)
        require_at_least("--answer-tokens", self.num_answer_tokens, 1)


def plan_conversations(documents: Sequence[Document], shape: ConversationShape) -> list[Turn]:
    """Return every turn in the order in which it is served. Pure."""
    turns = []
    for number in range(1, shape.num_turns + 1):
        conversations = range(shape.num_conversations)
        for conversation in conversations if number % 2 else reversed(conversations):
            text = ask(conversation, number)
            if number == 1:
                text = open_conversation(documents, conversation, shape.num_passage_tokens) + text
            label = f"{conversation + 1}.{number}"
            turns.append(Turn(label, conversation, number, tuple(text), shape.num_answer_tokens))
    return turns


def open_conversation(documents: Sequence[Document], conversation: int, num_tokens: int) -> bytes:
    """Return a heading and a passage, ``num_tokens`` tokens that no other conversation begins with. Pure.

    Conversations beyond the number of documents go on where the earlier ones about that document stopped; a
    document that ends is followed by the next.
    """
    first = conversation % len(documents)
    begin = conversation // len(documents) * num_tokens
    heading = f"Conversation {conversation + 1}, about {documents[first].name}\n\n".encode()
    ordered = [*documents[first:], *documents[:first]]
    flow = cycle(byte for document in ordered for byte in document.text)
    return (heading + bytes(islice(flow, begin, begin + num_tokens)))[:num_tokens]


def ask(conversation: int, number: int) -> bytes:
    """Return the question of one turn. Pure."""
    question = QUESTIONS[(conversation + number - 1) % len(QUESTIONS)]
    return f"\n\nQuestion {number}: {question}\nAnswer: ".encode()
