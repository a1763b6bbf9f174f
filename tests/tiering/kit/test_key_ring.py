"""A key ring's file is private, whole and exactly of its format, or one line says what is wrong with it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.kit.key_ring import (
    KeyRing,
    add_entry,
    drop_tenant,
    format_ring,
    locked,
    make_ring,
    read_ring,
    write_ring,
)

NOW_S = 1_700_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a ring with a default entry and one of a tenant."""
    path = tmp_path / "ring.json"
    write_ring(path, add_entry(add_entry(make_ring(), None, NOW_S), "acme", NOW_S), is_new=True)
    return path


def change(path: Path, **fields: object) -> None:
    """Change fields of the ring in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_was_written_is_read(path: Path) -> None:
    ring = read_ring(path)
    assert [(entry.number, entry.tenant, entry.created_s) for entry in ring.entries] == [
        (1, None, NOW_S),
        (2, "acme", NOW_S),
    ]
    assert len({entry.secret for entry in ring.entries} | {ring.names_secret}) == 3
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_no_secret_is_in_a_repr(path: Path) -> None:
    ring = read_ring(path)
    for secret in (ring.names_secret, *(entry.secret for entry in ring.entries)):
        assert secret.hex() not in repr(ring)
        assert repr(secret) not in repr(ring)


def test_the_newest_entry_of_a_tenant_is_current_and_the_older_one_stays(path: Path) -> None:
    ring = add_entry(read_ring(path), "acme", NOW_S + 1)
    current = ring.current("acme")
    assert current is not None
    assert current.number == 3
    assert ring.entry(2) is not None


def test_a_dropped_number_is_never_given_again(path: Path) -> None:
    ring = add_entry(drop_tenant(read_ring(path), "acme"), "acme", NOW_S)
    assert [entry.number for entry in ring.entries] == [1, 3]
    assert ring.dropped == {"acme": (2,)}
    write_ring(path, ring)
    assert read_ring(path) == ring


def test_dropping_a_tenant_without_an_entry_names_those_that_have_one(path: Path) -> None:
    with pytest.raises(ConfigError, match="those with one are acme"):
        drop_tenant(read_ring(path), "other")


def test_create_leaves_a_ring_that_is_there_alone(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        write_ring(path, make_ring(), is_new=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_ring_that_others_may_read_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_ring(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_a_ring_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_ring(path)


def test_a_missing_ring_a_folder_and_a_link_in_a_circle_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="kvtier keys create"):
        read_ring(path.with_name("none"))
    with pytest.raises(ConfigError, match="no regular file"):
        read_ring(path.parent)
    link = path.with_name("link")
    link.symlink_to(link)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ring(link)
    with pytest.raises(ConfigError, match="ring"):
        write_ring(link, make_ring())


def mount_as_secret(ring: Path) -> Path:
    """Return the path of a ring that is mounted as Kubernetes mounts secrets: a link through the link ``..data``."""
    mount = ring.parent / "mount"
    (mount / "..2026").mkdir(parents=True)
    ring.rename(mount / "..2026" / ring.name)
    (mount / "..data").symlink_to("..2026")
    (mount / ring.name).symlink_to(f"..data/{ring.name}")
    return mount / ring.name


def test_a_ring_behind_links_is_read_and_changed_where_it_lies(path: Path) -> None:
    before, mounted = read_ring(path), mount_as_secret(path)
    assert read_ring(mounted) == before
    changed = add_entry(before, None, NOW_S)
    with locked(mounted):
        write_ring(mounted, changed)
    assert mounted.is_symlink()
    assert read_ring(mounted) == read_ring(mounted.parent / "..2026" / path.name) == changed


@pytest.mark.parametrize("mode", [0o640, 0o444])
def test_an_open_mode_behind_links_is_refused(path: Path, mode: int) -> None:
    mounted = mount_as_secret(path)
    mounted.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_ring(mounted)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_a_link_to_a_ring_of_another_user_is_refused(path: Path) -> None:
    mounted = mount_as_secret(path)
    os.chown(mounted, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_ring(mounted)


def test_a_fifo_in_place_of_a_ring_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ring", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        read_ring(tmp_path / "ring")


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", "\ud800", "[" * 100_000, '{"names": 1}'])
def test_what_is_no_ring_is_refused(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match="kvtier keys create"):
        read_ring(path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kvtier_keys": 2}, "of version 2"),
        ({"kvtier_keys": "1"}, "of version '1'"),
        ({"more": 1}, "unknown one"),
        ({"names": "00" * 31}, "names: a secret must be 32 bytes"),
        ({"names": "x" * 64}, "names: a secret must be 32 bytes"),
        ({"names": None}, "names: a secret must be 32 bytes"),
        ({"next_number": 2}, "next_number"),
        ({"next_number": 0}, "next_number"),
        ({"next_number": "9"}, "next_number"),
        ({"entries": {}}, "no list"),
        ({"dropped": []}, "no names"),
        ({"dropped": {"a": ["b"]}}, "no numbers"),
    ],
)
def test_a_ring_with_a_wrong_field_is_refused_by_name(
    path: Path, fields: dict[str, Any], reason: str
) -> None:
    change(path, **fields)
    with pytest.raises(ConfigError, match=reason):
        read_ring(path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"number": 1}, "the number 1 twice"),
        ({"number": 0}, "number is none"),
        ({"number": 2**32}, "number is none"),
        ({"number": True}, "number is none"),
        ({"secret": "00" * 16}, "entry 2: a secret must be 32 bytes"),
        ({"secret": 5}, "entry 2: a secret must be 32 bytes"),
        ({"created_s": -1}, "entry 2 has no time"),
        ({"tenant": ""}, "entry 2 has a tenant"),
        ({"tenant": 3}, "entry 2 has a tenant"),
        ({"tenant": "\ud800"}, "entry 2 has a tenant"),
        ({"extra": 3}, "unknown one"),
    ],
)
def test_a_ring_with_a_wrong_entry_is_refused_by_number(
    path: Path, fields: dict[str, Any], reason: str
) -> None:
    entries = json.loads(path.read_text())["entries"]
    change(path, entries=[entries[0], entries[1] | fields])
    with pytest.raises(ConfigError, match=reason):
        read_ring(path)


def test_no_refusal_repeats_a_secret(path: Path) -> None:
    secret = json.loads(path.read_text())["entries"][0]["secret"]
    for text in (path.read_text() + "}", path.read_text().replace(secret, secret + "ab")):
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            read_ring(path)
        assert secret not in str(refused.value)
        assert refused.value.__cause__ is None


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_ring(tmp_path / "missing" / "ring", make_ring())


def test_an_empty_ring_is_one() -> None:
    assert "entries" in format_ring(KeyRing(bytes(32)))
