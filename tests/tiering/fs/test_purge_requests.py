"""Requests for purges are read until they are done, and what is no request asks for nothing."""

import json
import os
from pathlib import Path

import pytest
from tests.tiering.fs.packed import NAMESPACE

from kvtier.tiering.fs.purge_requests import (
    MAX_AGE_S,
    MAX_BLOCKS,
    MAX_REQUESTS,
    NamedBlock,
    drop_request,
    make_request,
    parse_requests,
    read_requests,
    write_request,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory."""
    return tmp_path


def test_requests_are_read_until_they_are_dropped(root: Path) -> None:
    assert read_requests(root) == []
    first, second = make_request(NAMESPACE, None), make_request(None, 7)
    write_request(root, first)
    write_request(root, second)
    assert read_requests(root) == [first, second]
    drop_request(root, first.id)
    assert read_requests(root) == [second]
    drop_request(root, first.id)
    drop_request(root, second.id)
    assert not (root / ".purge").exists()


def test_requests_of_processes_that_were_killed_make_room(root: Path) -> None:
    old = [make_request(None, number)._replace(since_s=5.0) for number in range(3)]
    (root / ".purge").write_text(json.dumps(old))
    (root / ".purge").chmod(0o600)
    assert read_requests(root) == old
    request = make_request(None, None)
    write_request(root, request)
    assert read_requests(root) == [request]
    assert MAX_AGE_S > 60


def test_more_requests_than_are_read_are_refused(root: Path) -> None:
    for number in range(MAX_REQUESTS):
        write_request(root, make_request(None, number))
    with pytest.raises(OSError, match="wait until they are done"):
        write_request(root, make_request(None, None))
    assert len(read_requests(root)) == MAX_REQUESTS


GOOD = make_request(NAMESPACE, 3, [NamedBlock("ab" * 16, 5, "cd" * 36, 17), NamedBlock("ab" * 16, 6, "ef")])


def test_a_request_among_others_counts() -> None:
    assert parse_requests(json.dumps([5, GOOD, None]).encode()) == [GOOD]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"7", b"[" * 10000, b"[[]]", b"[null]", b'["ab"]', b"\xff", b"1" * 9999]
)
def test_what_is_no_list_of_requests_is_none(data: bytes) -> None:
    assert parse_requests(data) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "0123456789abcdeg"), ("id", "../../x"), ("id", None), ("id", ["0123456789abcdef"]),
        ("namespace", "../x"), ("namespace", 5), ("namespace", NAMESPACE + "0"),
        ("tenant", True), ("tenant", -1), ("tenant", 1.5), ("tenant", "1"), ("tenant", 2**64),
        ("since_s", float("nan")), ("since_s", float("inf")), ("since_s", "now"), ("since_s", None),
        ("since_s", 10**300),
        ("blocks", 5), ("blocks", {}), ("blocks", [["ab" * 16, 1, "ab", None]] * (MAX_BLOCKS + 1)),
    ],
)  # fmt: skip
def test_a_request_that_says_what_cannot_be_is_left_out(field: str, value: object) -> None:
    wrong = GOOD._asdict() | {field: value}
    assert parse_requests(json.dumps([list(wrong.values())]).encode()) == []


@pytest.mark.parametrize(
    "block",
    [
        5, ["ab"], ["ab" * 16, 1, "ab"], ["ab", 1, "ab", None], ["ab" * 16, -1, "ab", None],
        ["ab" * 16, 2**32, "ab", None], ["ab" * 16, 1, "ab" * 41, None], ["ab" * 16, 1, "a", None],
        ["ab" * 16, 1, "ab", "now"], ["ab" * 16, True, "ab", None],
    ],
)  # fmt: skip
def test_a_block_that_cannot_be_is_left_out_of_a_request(block: object) -> None:
    request = GOOD._asdict() | {"blocks": [block, ["ab" * 16, 1, "ab", None]]}
    (found,) = parse_requests(json.dumps([list(request.values())]).encode())
    assert found.blocks == (NamedBlock("ab" * 16, 1, "ab"),)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_list_that_is_no_file_is_empty_and_is_not_waited_for(root: Path, kind: str) -> None:
    path = root / ".purge"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(root / "target")
        (root / "target").write_text(json.dumps([make_request(None, None)]))
    else:
        path.mkdir()
    assert read_requests(root) == []
