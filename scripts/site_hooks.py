"""Hooks of mkdocs for ``make site``: pages link to files of the repository, and the site has to have them.

Markdown outside of ``docs`` becomes a page under ``project/``; every other file that a page links to becomes a page
under ``source/`` which shows it. Links are rewritten to these pages. The search leaves decisions (``docs/adr``) out.
Source: mkdocs 1.6, hooks.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.check_docs import FENCE, OUTSIDE

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)")
NO_RUN = re.compile(r"^(```python) no-run$", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml"}

Config = Any  # Any: mkdocs' configuration reads like a mapping, and ships no types of its own options


def on_files(files: Files, config: Config) -> Files:
    """Add a page for each file outside of ``docs`` that a page links to."""
    root = Path(config["config_file_path"]).parent
    waiting = [(file.src_uri, file.content_string) for file in files if file.is_documentation_page()]
    waiting += [(path.name, path.read_text(encoding="utf-8")) for path in root.glob("*.md")]
    for uri, text in waiting:
        is_outside = "/" not in uri and (root / uri).exists()
        base = root if is_outside else (root / "docs" / uri).parent
        for target in targets(text):
            path = Path(os.path.normpath(base / target))
            page = site_page(path, root)
            if page is not None and path.is_file() and files.get_file_from_path(page) is None:
                files.append(File.generated(config, page, content=page_text(path, root)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links that leave ``docs`` to the pages made for them, and drop the marks that only tests read."""
    uri = page.file.src_uri
    if uri.startswith("adr/"):
        page.meta["search"] = {"exclude": True}
    root = Path.cwd()
    inside = uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}"
    return NO_RUN.sub(r"\1", rewrite(markdown, uri, (root / inside).parent, root))


def rewrite(markdown: str, uri: str, base: Path, root: Path) -> str:
    """Return the text of page ``uri`` with its links, which are relative to ``base``, made those of the site. Pure."""

    def replace(found: re.Match[str]) -> str:
        if OUTSIDE.match(found[2]):
            return found[0]
        path = Path(os.path.normpath(base / found[2]))
        target = site_page(path, root) or os.path.relpath(path, root / "docs")
        return found[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".")

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replace, markdown[end:])])


def targets(text: str) -> list[str]:
    """Return what a page links to inside the project, code blocks left out. Pure."""
    return [target for _, target in LINK.findall(FENCE.sub("", text)) if not OUTSIDE.match(target)]


def site_page(path: Path, root: Path) -> str | None:
    """Return the page that shows a file of the repository; None for what lies in ``docs`` already. Pure."""
    if path.is_relative_to(root / "docs"):
        return None
    inside = path.relative_to(root).as_posix()
    if inside == "README.md":
        return "index.md"
    return f"project/{inside}" if path.suffix == ".md" else f"source/{inside}.md"


def page_text(path: Path, root: Path) -> str:
    """Return the Markdown of the page that shows ``path``."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    title = path.relative_to(root).as_posix()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
