"""Check README and docs: every link leads somewhere, every page is linked, every Python block compiles.

It runs no code block; ``tests/docs`` does. Links to other sites are not followed.

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
    return broken + unlinked_pages(found, root / "README.md") + syntax


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
