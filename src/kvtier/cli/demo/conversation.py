"""The demo's conversations: documents, and questions about passages of them, as bytes.

Without a directory from the user, the documents are kvtier's own pages, which a checkout has beside the package. A
wheel has none; it uses the package's own source files instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from kvtier.cli.demo.options import require_at_least
from kvtier.errors import ConfigError
from kvtier.input_files import is_dir

PACKAGE_FOLDER = Path(__file__).parents[2]
DOCUMENT_SUFFIXES = (".md", ".rst", ".txt")
SOURCE_SUFFIXES = (".py",)

MAX_DOCUMENT_BYTES = 1_000_000
"""Bytes read of one file. A demo needs a few thousand; more would only make a large log file slow to read."""

QUESTIONS = (
    "What does this passage promise, and to whom?",
    "Which of its words has a meaning of its own here?",
    "What would break if the opposite were done?",
    "Where would you look first when it goes wrong?",
    "What does it leave open, and who decides that?",
    "How would you explain it to a beginner?",
)


@dataclass(frozen=True, slots=True)
class Document:
    """One file's text.

    Attributes:
        name: its path relative to the directory that was read.
        text: its bytes; the demo's tokens are bytes.
    """

    name: str
    text: bytes


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


def read_documents(directory: Path | None) -> list[Document]:
    """Read the documents under ``directory``, or kvtier's own, ordered by name.

    Raises:
        ConfigError: there is no such directory, it has no text, or a file cannot be read.
    """
    if directory is None:
        return find_own_documents(PACKAGE_FOLDER)
    if not is_dir(directory):
        raise ConfigError("--docs", str(directory), "must be an existing directory with documents")
    documents = read_folder(directory, DOCUMENT_SUFFIXES)
    if not documents:
        kinds = ", ".join(DOCUMENT_SUFFIXES)
        raise ConfigError("--docs", str(directory), f"has no text: put files ending in {kinds} into it")
    return documents


def find_own_documents(package_folder: Path) -> list[Document]:
    """Return the pages in ``docs`` of the checkout around ``package_folder``, else the package's sources."""
    pages = read_folder(package_folder.parents[1] / "docs", DOCUMENT_SUFFIXES)
    is_checkout = package_folder.parent.name == "src"
    return pages if is_checkout and pages else read_folder(package_folder, SOURCE_SUFFIXES)


def read_folder(folder: Path, suffixes: tuple[str, ...]) -> list[Document]:
    """Return every file under ``folder`` with one of ``suffixes`` that is not empty, ordered by name."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    documents = [Document(str(path.relative_to(folder)), _read(path)) for path in paths]
    return [document for document in documents if document.text]


def plan_conversations(documents: Sequence[Document], shape: ConversationShape) -> list[Turn]:
    """Return every turn in the order in which it is served. Pure."""
    turns = []
    for number in range(1, shape.num_turns + 1):
        conversations = range(shape.num_conversations)
        for conversation in conversations if number % 2 else reversed(conversations):
            text = make_question(conversation, number)
            if number == 1:
                text = make_opening(documents, conversation, shape.num_passage_tokens) + text
            label = f"{conversation + 1}.{number}"
            turns.append(Turn(label, conversation, number, tuple(text), shape.num_answer_tokens))
    return turns


def make_opening(documents: Sequence[Document], conversation: int, num_tokens: int) -> bytes:
    """Return a heading and a passage of ``num_tokens`` tokens together; no other conversation begins with them. Pure.

    When there are more conversations than documents, later conversations continue where the earlier ones about the
    same document stopped. After a document's end the next document follows.
    """
    first = conversation % len(documents)
    begin = conversation // len(documents) * num_tokens
    heading = f"Conversation {conversation + 1}, about {documents[first].name}\n\n".encode()
    ordered = [*documents[first:], *documents[:first]]
    flow = cycle(byte for document in ordered for byte in document.text)
    return (heading + bytes(islice(flow, begin, begin + num_tokens)))[:num_tokens]


def make_question(conversation: int, number: int) -> bytes:
    """Return the question of one turn. Pure."""
    question = QUESTIONS[(conversation + number - 1) % len(QUESTIONS)]
    return f"\n\nQuestion {number}: {question}\nAnswer: ".encode()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise ConfigError("--docs", str(path), f"cannot be read: {error.strerror}") from error
