"""Ids say that two blocks are equal, and to who lacks the secret nothing else."""

import os
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.recording.trace_salt import TraceSalt, draw_salt, read_salt_file

NAMES = [f"block {number}".encode() for number in range(200)]


def write_secret(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=16, max_size=64))
def test_equal_names_have_equal_ids_that_a_trace_can_hold(name: bytes, secret: bytes) -> None:
    assert TraceSalt(secret).id_of(name) == TraceSalt(secret).id_of(name)
    assert 0 <= TraceSalt(secret).id_of(name) < 2**63


def test_different_names_have_different_ids() -> None:
    salt = draw_salt()

    assert len({salt.id_of(name) for name in NAMES}) == len(NAMES)


def test_who_knows_the_names_finds_none_of_them_without_the_secret() -> None:
    salt = draw_salt()
    ids = {salt.id_of(name) for name in NAMES}

    guesses = {TraceSalt(secret).id_of(name) for name in NAMES for secret in (b"", b"\0" * 32)}
    for size in (8, 16, 32, 64):
        digests = (blake2b(name, digest_size=size).digest() for name in NAMES)
        guesses |= {int.from_bytes(digest[:8], "big") >> 1 for digest in digests}
    guesses |= {int.from_bytes(name[:8], "big") & (2**63 - 1) for name in NAMES}
    assert not ids & guesses


def test_two_recordings_share_no_id() -> None:
    first, second = draw_salt(), draw_salt()

    assert not {first.id_of(name) for name in NAMES} & {second.id_of(name) for name in NAMES}


def test_recordings_with_one_salt_file_agree_and_with_another_do_not(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "salt", bytes(range(32)))
    other = write_secret(tmp_path / "other", bytes(range(1, 33)))

    assert read_salt_file(path).id_of(b"block") == read_salt_file(path).id_of(b"block")
    assert read_salt_file(path).id_of(b"block") != read_salt_file(other).id_of(b"block")


def test_each_byte_of_a_long_salt_file_counts(tmp_path: Path) -> None:
    one = read_salt_file(write_secret(tmp_path / "one", b"a" * 999 + b"b"))
    other = read_salt_file(write_secret(tmp_path / "other", b"a" * 999 + b"c"))

    assert one.id_of(b"block") != other.id_of(b"block")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o620])
def test_a_secret_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "salt", bytes(32), mode)

    with pytest.raises(ConfigError, match=r"record_salt_file=.*others may read or change it.*chmod 600"):
        read_salt_file(path)


@pytest.mark.parametrize("num_bytes", [0, 15, 4097])
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, num_bytes: int) -> None:
    with pytest.raises(ConfigError, match="16 to 4096 bytes"):
        read_salt_file(write_secret(tmp_path / "salt", bytes(num_bytes)))


def test_a_missing_file_and_a_folder_are_refused_and_the_remedy_makes_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*umask 077; head -c 32"):
        read_salt_file(tmp_path / "missing")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_salt_file(tmp_path)


def test_a_salt_does_not_show_its_secret() -> None:
    assert repr(TraceSalt(b"the secret of this recording")) == "TraceSalt(...)"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "salt", 0o600)

    with pytest.raises(ConfigError, match="must be a file of 16 to 4096 bytes"):
        read_salt_file(tmp_path / "salt")
