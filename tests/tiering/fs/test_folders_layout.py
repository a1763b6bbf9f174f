"""Names in the directory are made and recognised, and others are nobody's."""

from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import folders

KEY = OffloadKey(bytes.fromhex("a1b2") + bytes(34))


def test_a_block_lies_two_folders_below_its_namespace() -> None:
    path = folders.block_path("/root/ns", KEY)
    assert path == f"/root/ns/a/1/{KEY.hex()}.kv"


def test_the_shortest_and_the_longest_key_have_a_place() -> None:
    assert folders.block_path("/ns", OffloadKey(b"\x0f")) == "/ns/0/f/0f.kv"
    longest = OffloadKey(bytes(40))
    assert folders.parse_block_name(Path(folders.block_path("/ns", longest)).name) == longest


def test_a_block_name_gives_its_key_back() -> None:
    assert folders.parse_block_name(f"{KEY.hex()}.kv") == KEY


@pytest.mark.parametrize("name", ["", ".kv", "abc.kv", "zz.kv", f"{KEY.hex()}.kv.bak", KEY.hex(), "AB.kv"])
def test_other_names_are_no_blocks(name: str) -> None:
    assert folders.parse_block_name(name) is None


def test_a_path_tells_its_namespace() -> None:
    assert folders.namespace_of(folders.block_path("/root/of/all/0123", KEY)) == "0123"
    assert folders.namespace_path(Path("/root"), "0123") == "/root/0123"
