"""The documents that the demo's conversations are about, as bytes.

It chooses no passage. Without a directory of the user's, kvtier's own pages are read where they are installed
beside the package (a checkout); a wheel has none, and then the package's own sources, whose docstrings say much
the same, take their place.
"""

from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

PACKAGE_FOLDER = Path(__file__).parents[2]
DOCUMENT_SUFFIXES = (".md", ".rst", ".txt")
SOURCE_SUFFIXES = (".py",)

MAX_DOCUMENT_BYTES = 1_000_000
"""Bytes read of one file. A demo needs a few thousand; more would only make a stray log file slow to read."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file's text.

    Attributes:
        name: where it was, relative to the directory that was read.
        text: its bytes; the demo's tokens are bytes.
    """

    name: str
    text: bytes


def read_documents(directory: Path | None) -> list[Document]:
    """Read the documents under ``directory``, or kvtier's own, ordered by name.

    Raises:
        ConfigError: there is no such directory, it has no text, or a file cannot be read.
    """
    if directory is None:
        return find_own_documents(PACKAGE_FOLDER)
    if not directory.is_dir():
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


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise ConfigError("--docs", str(path), f"cannot be read: {error.strerror}") from error
