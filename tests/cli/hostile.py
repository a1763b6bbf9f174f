"""Input that no one means: words and files that a command must refuse in one line, or take for what they are."""

import os
from collections.abc import Callable
from pathlib import Path

MARK = "zqzq"
"""Stands in long values, so that a test sees whether a message repeats them whole."""

WORDS: dict[str, str] = {
    "400 digits": "9" * 400,
    "5000 digits": "9" * 5000,
    "negative": "-1",
    "zero": "0",
    "a fraction": "0.5",
    "not a number": "nan",
    "infinite": "inf",
    "beyond a float": "1e999",
    "2^64": str(2**64),
    "true": "true",
    "a zero byte": "a\0b",
    "half a surrogate pair": "a\udcffb",
    "nothing": "",
    "a long word": MARK * 2500,
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 20_000,
    "a secret URL": "redis://:sesame@127.0.0.1:1/x?token=sesame",
}
"""By what they are, words for numbers and names."""

SPARSE_BYTES = 2**31
"""Length of a file that takes no room: none reads so much to find that it has no line."""


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "empty": lambda path: path.write_bytes(b""),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00{}"),
    "zero bytes": lambda path: path.write_bytes(bytes(100)),
    "2 GiB of zeros": _sparse,
    "deep lists": lambda path: path.write_bytes(b"[" * 100_000),
    "deep objects": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "deep tables": lambda path: path.write_bytes(b"a = " + b"[" * 100_000),
    "5000 digits": lambda path: path.write_bytes(b'{"num_hidden_layers": ' + b"9" * 5000 + b"}"),
    "400 digits": lambda path: path.write_bytes(b'{"num_hidden_layers": ' + b"9" * 400 + b"}"),
    "half a surrogate pair": lambda path: path.write_bytes(b'{"\\ud800": "\\udfff"}'),
    "no object": lambda path: path.write_bytes(b"7"),
    "an unknown object": lambda path: path.write_bytes(b'{"%b": 1}' % (MARK.encode() * 2500)),
    "a line without end": lambda path: path.write_bytes(b'{"a": "' + MARK.encode() * 10_000_000),
    "a loop of links": lambda path: path.symlink_to(path),
}
"""By what they are, what makes a file at a path."""
