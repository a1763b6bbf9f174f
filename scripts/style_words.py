"""Phrases that the project avoids in prose: personified code and private nouns. ``style_limits`` reports them."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORDS_CHECKED_IN = ("benchmarks", "src/kvtier")
"""Files and folders whose prose is checked, as paths below the project's root."""

FORBIDDEN_WORDS = re.compile(
    r"\b(?:whoever|somebody|nobody|heirs?|dooms?|doomed|bury|buried|survey(?:s|ed)?|moods?|strangers?|wish(?:es)?|"
    r"(?:is|are|was|were)\s+told|(?:has|have|had)\s+heard|(?:the|no)\s+news|in\s+a\s+while|what\s+became\s+of|"
    r"gives?\s+up)\b",
    re.IGNORECASE,
)
"""A reader must decode these words; a subject and a verb say what happens."""


def find_words(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and phrase of each forbidden phrase in comments and strings of a checked file. Pure."""
    if not any(_is_below(path, place) for place in WORDS_CHECKED_IN):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Since Python 3.12 the parts of an f-string are tokens of their own.
        if tokenize.tok_name[token.type] in {"COMMENT", "STRING", "FSTRING_MIDDLE"}:
            for found in FORBIDDEN_WORDS.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, found.start()), found[0]


def _is_below(path: Path, place: str) -> bool:
    return f"/{place}/" in f"/{path.as_posix()}/"
