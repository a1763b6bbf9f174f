"""Processes that share a directory of packs never own one twice, and together stay within the capacity."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiering.fs.directory_peer import Peer
from tests.tiering.fs.packed import (
    CAPACITY_BYTES,
    NAMESPACE,
    Clock,
    changes_of,
    create,
    make_directory,
    stored,
    used_on_disk,
)

from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_header import disk_bytes_of
from kvtier.tiering.fs.system_calls import SystemCalls

pytestmark = pytest.mark.slow

NUM_PACKS = CAPACITY_BYTES // disk_bytes_of(make_directory(Path("/nowhere"), is_ready=False).geometry)

StartPeer = Callable[[str], Peer]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory."""
    return tmp_path / "root"


@pytest.fixture
def start_peer(root: Path) -> Iterator[StartPeer]:
    """Start processes that use the directory; they end with the test."""
    peers: list[Peer] = []

    def start(name: str) -> Peer:
        peers.append(Peer(root, name))
        assert peers[-1].ask("ready") is True
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


def names_of(answer: object) -> list[str]:
    """Return the names of packs that a process has answered."""
    assert isinstance(answer, list)
    return answer


def test_processes_that_create_and_adopt_at_once_stay_within_the_capacity_and_own_no_pack_twice(
    root: Path, start_peer: StartPeer
) -> None:
    peers = [start_peer(f"peer{number}") for number in range(3)]
    owned: dict[Peer, list[str]] = {peer: [] for peer in peers}
    choose = random.Random(7)
    directory = make_directory(root)
    for _ in range(12):
        asked = []
        for peer in peers:
            kind = choose.choice(["create", "create", "adopt", "release"])
            arguments: dict[str, list[object]] = {
                "create": [choose.randrange(1, 5)],
                "adopt": [sorted(directory.names(NAMESPACE))],
                "release": [],
            }
            peer.send(kind, *arguments[kind])
            asked.append((peer, kind))
        for peer, kind in asked:
            answer = peer.answer()
            owned[peer] = [] if kind == "release" else owned[peer] + names_of(answer)
        everything = [name for names in owned.values() for name in names]
        assert len(everything) == len(set(everything))
        assert used_on_disk(root) <= CAPACITY_BYTES
        assert set(everything) <= directory.names(NAMESPACE)
        assert {one.name for one in directory.list_packs() if one.is_owned} == set(everything)
    assert len(directory.names(NAMESPACE)) <= NUM_PACKS


def test_a_full_directory_of_packs_without_owners_is_shared_out_once(
    root: Path, start_peer: StartPeer
) -> None:
    peers = [start_peer(f"peer{number}") for number in range(3)]
    names = names_of(peers[0].ask("create", NUM_PACKS + 1))
    assert len(names) == NUM_PACKS
    peers[0].ask("release")
    for peer in peers:
        peer.send("adopt", names)
    adopted = [name for peer in peers for name in names_of(peer.answer())]
    assert sorted(adopted) == sorted(names)


def test_packs_of_a_killed_process_are_adopted_with_what_it_recorded(
    root: Path, start_peer: StartPeer
) -> None:
    peer, directory = start_peer("peer"), make_directory(root)
    (name,) = names_of(peer.ask("create", 1))
    assert directory.adopt(NAMESPACE, name) is None
    peer.kill()
    pack = directory.adopt(NAMESPACE, name)
    assert pack is not None
    assert (pack.was_closed, pack.same_boot) == (False, True)
    assert changes_of(pack.journal.tail().records) == [stored(0)]
    pack.close()


def test_packs_of_a_stopped_process_are_read_and_not_adopted(root: Path, start_peer: StartPeer) -> None:
    peer, directory = start_peer("peer"), make_directory(root)
    (name,) = names_of(peer.ask("create", 1))
    peer.stop()
    assert directory.adopt(NAMESPACE, name) is None
    reader = directory.open(NAMESPACE, name)
    assert reader is not None
    assert changes_of(reader.journal.tail().records) == [stored(0)]
    assert directory.create(NAMESPACE, disk_bytes_of(directory.geometry), may_remove=True) is None
    assert not reader.is_lost()
    reader.close()
    peer.process.send_signal(signal.SIGCONT)


def test_a_stopped_process_that_holds_the_lock_costs_a_wait_and_no_pack(
    root: Path, start_peer: StartPeer
) -> None:
    peer, clock = start_peer("peer"), Clock()
    directory = make_directory(root, clock=clock, pause=clock.pause)
    pack = create(directory)
    assert peer.ask("lock") is True
    peer.stop()
    assert directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True) is None
    pack.journal.append([stored(1)])
    pack.close()
    assert directory.adopt(NAMESPACE, pack.name) is None
    peer.kill()
    again = directory.adopt(NAMESPACE, pack.name)
    assert again is not None
    again.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_child_that_outlives_its_killed_parent_keeps_packs_only_if_it_did_not_close_them(
    root: Path, start_peer: StartPeer, closes: bool
) -> None:
    peer, directory = start_peer("peer"), make_directory(root)
    (name,) = names_of(peer.ask("create", 1))
    peer.send("note")
    assert peer.answer() is None
    child = peer.ask("fork", closes)
    assert isinstance(child, int)
    try:
        # The child has closed its standard output, so the answer's end says that it has done the rest as well.
        peer.process.kill()
        assert peer.answer() is None
        adopted = directory.adopt(NAMESPACE, name)
        assert (adopted is not None) == closes
        if adopted is not None:
            adopted.close()
    finally:
        os.kill(child, signal.SIGKILL)
        peer.close()


def test_a_pack_that_a_killed_process_was_making_is_removed(root: Path, start_peer: StartPeer) -> None:
    directory = make_directory(root)
    folder = directory.make_folder(NAMESPACE)
    pid = os.fork()
    if pid == 0:

        def die(old: str, new: str) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        make_directory(root, calls=SystemCalls(rename=die)).create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert {path.suffix for path in folder.iterdir()} == {".new", ".index"}
    packs: list[Pack] = []
    while (pack := directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=False)) is not None:
        packs.append(pack)
    assert len(packs) == NUM_PACKS
    assert {path.suffix for path in folder.iterdir()} == {".pack", ".index"}
    for pack in packs:
        pack.close()
