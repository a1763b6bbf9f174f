"""Sockets are in a folder that only their user can enter, under names that fit, and a line is one JSON object."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvtier.errors import ControlError
from kvtier.observe import control_wire
from kvtier.observe.control_wire import (
    decode,
    encode,
    is_dead,
    list_runtime_folders,
    locked_folder,
    make_control_folder,
    make_socket_name,
    short_path,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_in_the_runtime_directory_and_private(folder: Path) -> None:
    made = make_control_folder({"XDG_RUNTIME_DIR": str(folder)})

    assert made == folder / "kvtier"
    assert mode_of(made) == 0o700


def test_a_folder_that_others_could_enter_is_closed_to_them(folder: Path) -> None:
    (folder / "kvtier").mkdir(mode=0o755)

    assert mode_of(make_control_folder({"XDG_RUNTIME_DIR": str(folder)})) == 0o700


def test_without_a_runtime_directory_the_folder_is_a_private_one_for_temporary_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        control_wire,
        "list_runtime_folders",
        lambda _: [Path("/proc/nothing/kvtier"), folder / "kvtier-0" / "kvtier"],
    )
    made = make_control_folder({})

    assert made == folder / "kvtier-0" / "kvtier"
    assert mode_of(made) == mode_of(made.parent) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "kvtier").symlink_to(folder / "elsewhere")
    monkeypatch.setattr(control_wire, "list_runtime_folders", lambda _: [folder / "kvtier"] * 2)

    with pytest.raises(ControlError, match="is not a directory of user"):
        make_control_folder({})


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_wire, "list_runtime_folders", lambda _: [folder / "kvtier"] * 2)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)

    with pytest.raises(ControlError, match=f"is not a directory of user {own + 1}"):
        make_control_folder({})


def test_a_client_looks_wherever_an_engine_may_listen() -> None:
    found = list_runtime_folders({"XDG_RUNTIME_DIR": "/run/mine"}, uid=7)

    assert found[:2] == [Path("/run/mine/kvtier"), Path("/run/user/7/kvtier")]
    assert found[2].parts[-2:] == ("kvtier-7", "kvtier")
    assert list_runtime_folders({"XDG_RUNTIME_DIR": "relative"}, uid=7) == found[1:]


@pytest.mark.parametrize("instance_id", ["plain", "a/b", "../../etc", ".hidden", "x" * 500, "", "ä b\n"])
def test_a_name_is_one_plain_path_component_that_fits(instance_id: str) -> None:
    name = make_socket_name(instance_id)

    assert "/" not in name
    assert not name.startswith(".")
    assert name.isascii()
    assert name.endswith(".sock")
    assert len(name) <= 70


def test_ids_that_look_alike_have_names_of_their_own() -> None:
    assert len({make_socket_name(name) for name in ("a/b", "a_b", "a b", "x" * 80, "x" * 81)}) == 5
    assert make_socket_name("a", 1) != make_socket_name("a")


def test_a_socket_in_a_folder_with_a_long_path_can_be_bound_and_reached(folder: Path) -> None:
    deep = folder / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with short_path(deep / "a.sock") as name:
            listener.bind(name)
        listener.listen()
        with short_path(deep / "a.sock") as name:
            client.connect(name)

        assert (deep / "a.sock").is_socket()


def test_a_socket_without_a_process_is_dead_and_one_that_listens_is_not(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert not is_dead(path)

    assert is_dead(path)
    assert is_dead(folder / "missing.sock")


def test_one_process_at_a_time_creates_and_removes_sockets(folder: Path) -> None:
    pauses: list[float] = []
    with (
        locked_folder(folder),
        pytest.raises(ControlError, match="stays locked"),
        locked_folder(folder, pauses.append),
    ):
        pass
    assert len(pauses) == control_wire.LOCK_TRIES
    with locked_folder(folder, pauses.append):
        pass


def test_numbers_that_json_lacks_are_null() -> None:
    line = encode({"a": float("nan"), "b": {"c": [float("inf"), 1.5]}})

    assert decode(line) == {"a": None, "b": {"c": [None, 1.5]}}
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


@pytest.mark.parametrize("line", [b"", b"garbage", b"[1]", b"1", b"\xff\xfe", b"[" * 100_000, b'{"a":'])
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(ControlError, match="must be one JSON object"):
        decode(line)
