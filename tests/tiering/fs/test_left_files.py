"""What a process leaves that is killed between making a file and naming it goes by itself; a living one's stays."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.packed import make_directory
from tests.tiering.fs.placed import NAMESPACE, end, fill, remove_all

from kvtier.namespace import Namespace
from kvtier.tiering.fs import FSTier, system_calls
from kvtier.tiering.fs.directory_lock import DirectoryLock
from kvtier.tiering.fs.documents import PackPages, write_document
from kvtier.tiering.fs.notes import NotesState, OthersNotes, OwnNotes
from kvtier.tiering.fs.place import PackPlace
from kvtier.tiering.fs.purge_requests import drop_request, make_request, write_request
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls, try_lock

STATE = NotesState(NAMESPACE, 2**20)


def die(*_: object) -> None:
    """End the process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


def make_notes(root: Path, identity: Namespace) -> None:
    OwnNotes(root, "dead", calls=SystemCalls(try_lock=die)).update(STATE)  # type: ignore[arg-type]  # does not return


def try_directory(root: Path, identity: Namespace) -> None:
    make_directory(
        root, process="dead", calls=SystemCalls(unlink=lambda path: die() if Path(path).exists() else None)
    )


def describe(root: Path, identity: Namespace) -> None:
    write_document(make_directory(root), identity)


def keep_page(root: Path, identity: Namespace) -> None:
    PackPages(make_directory(root)).create(identity, b"a page")


def ask_for_a_purge(root: Path, identity: Namespace) -> None:
    write_request(root, make_request(None, None))


Act = Callable[[Path, Namespace], None]


def leave(root: Path, identity: Namespace, act: Act) -> set[str]:
    """Have a process do something that ends it before a file has its name; return what it has left."""
    before = set(root.rglob("*"))
    pid = os.fork()
    if pid == 0:
        system_calls.REAL_CALLS = replace(REAL_CALLS, rename=die)
        act(root, identity)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return {path.name for path in set(root.rglob("*")) - before}


def identity_of(start_tier: StartTier) -> Namespace:
    driver = start_tier()
    assert isinstance(driver.tier, FSTier)
    identity = driver.tier._catalog.namespace.identity
    end(driver)
    return identity


@pytest.mark.parametrize("act", [make_notes, try_directory, describe])
def test_what_a_killed_process_left_goes_when_another_one_works(
    root: Path, start_tier: StartTier, act: Act
) -> None:
    left = leave(root, identity_of(start_tier), act)
    assert len(left - {NAMESPACE, ".lock"}) == 1
    driver = start_tier()
    assert isinstance(driver.tier, FSTier)
    assert driver.store([1]).success
    driver.tier.keeper.tick(is_due=True)
    end(driver)
    assert {path.name for path in root.iterdir()} == {".lock", NAMESPACE}
    assert {path.name for path in (root / NAMESPACE).iterdir() if path.suffix not in {".pack", ".index"}} == {
        "namespace.json"
    }


def test_what_was_left_of_a_page_goes_with_the_next_one(root: Path, start_tier: StartTier) -> None:
    identity = identity_of(start_tier)
    assert len(leave(root, identity, keep_page) - {NAMESPACE, ".lock"}) == 1
    keep_page(root, identity)
    assert {path.name for path in (root / NAMESPACE).iterdir()} == {"probe.page"}


def test_what_was_left_of_a_purge_goes_with_the_next_one(root: Path, start_tier: StartTier) -> None:
    assert leave(root, identity_of(start_tier), ask_for_a_purge) >= {".purge.tmp"}
    request = make_request(None, None)
    write_request(root, request)
    drop_request(root, request.id)
    assert {path.name for path in root.iterdir()} == {".lock"}


@pytest.mark.parametrize("act", [describe, keep_page])
def test_what_a_killed_process_left_keeps_no_namespace(
    root: Path, start_tier: StartTier, place: PackPlace, act: Act
) -> None:
    identity = identity_of(start_tier)
    fill(start_tier, [1])
    (root / NAMESPACE / "namespace.json").unlink()
    assert len(leave(root, identity, act)) == 1
    assert remove_all(place) == 1
    assert not (root / NAMESPACE).exists()


def remove_dead(root: Path) -> None:
    """Do what another process does with the notes of dead ones."""
    others = OthersNotes(root, "other")
    others.poll()
    others.remove_dead(DirectoryLock(root).held)
    others.close()


def test_notes_that_others_take_for_a_dead_process_s_as_they_are_made_are_there_afterwards(
    root: Path,
) -> None:
    root.mkdir()
    num_taken = 0

    def taken_before(fd: int) -> bool:
        nonlocal num_taken
        if num_taken < 2 and os.fstat(fd).st_nlink:
            remove_dead(root)
            num_taken += 1
            assert not os.fstat(fd).st_nlink
        return try_lock(fd)

    own = OwnNotes(root, "own", calls=SystemCalls(try_lock=taken_before))
    own.update(STATE)
    assert num_taken == 2
    remove_dead(root)
    others = OthersNotes(root, "other")
    assert [one.process for one in others.poll()] == ["own"]
    others.close()
    own.close()


def test_notes_that_another_process_looks_at_as_they_are_made_count(root: Path) -> None:
    root.mkdir()
    answers = iter([False])
    own = OwnNotes(
        root, "own", calls=SystemCalls(try_lock=lambda fd: next(answers, None) is None and try_lock(fd))
    )
    own.update(STATE)
    others = OthersNotes(root, "other")
    assert [one.process for one in others.poll()] == ["own"]
    others.close()
    own.close()


def test_a_file_that_is_tried_may_be_taken_for_a_dead_process_s(root: Path) -> None:
    root.mkdir(mode=0o700)

    def taken_at_once(path: str, flags: int, mode: int) -> int:
        fd = os.open(path, flags, mode)
        remove_dead(root)
        return fd

    expected = make_directory(root, direct_io=True).has_direct_io
    calls = SystemCalls(open=taken_at_once)
    assert make_directory(root, direct_io=True, calls=calls).has_direct_io == expected
    assert {path.name for path in root.iterdir()} <= {".lock"}
