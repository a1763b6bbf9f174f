"""Processes of a directory learn from notes what others use, lack and have done; other files give nothing."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.fs.directory_peer import Peer
from tests.tiering.fs.packed import NAMESPACE, Faults, no_file_stays_open

from kvtier.tiering.fs import directory_lock
from kvtier.tiering.fs.directory_lock import DirectoryLock
from kvtier.tiering.fs.notes import (
    MAX_DAMAGED,
    MAX_PURGES,
    MAX_USES,
    STATE_BYTES,
    NotesState,
    OthersNotes,
    OwnNotes,
    WantNote,
    seal_notes,
)

PACK_IDS = [bytes([number]) * 8 for number in range(4)]
STATE = NotesState(
    NAMESPACE, 2**40, 17.5, WantNote(NAMESPACE, 1.5, None), (("ab" * 16, 3),), ("0" * 16,), 12, "host"
)
TIMES = st.none() | st.floats(-1e12, 1e12) | st.integers(0, 2**40)
HEX = st.binary(min_size=1, max_size=16).map(bytes.hex)
STATES = st.builds(
    NotesState,
    namespace=HEX,
    capacity_bytes=st.integers(0, 2**62),
    oldest_used_s=TIMES,
    wants=st.none() | st.builds(WantNote, HEX, st.floats(0, 1e12), TIMES),
    damaged=st.lists(st.tuples(HEX, st.integers(0, 2**32 - 1)), max_size=3).map(tuple),
    purges=st.lists(HEX, max_size=3).map(tuple),
    pid=st.integers(0, 2**22),
    host=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=64),
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The directory; no file of it stays open."""
    with no_file_stays_open(tmp_path):
        yield tmp_path


class Pair:
    """A process that writes notes, and one that reads them.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.own = OwnNotes(root, "own")
        self.own.update(STATE)
        self.others = OthersNotes(root, "other")

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.own.close()
        self.others.close()

    def uses(self) -> Sequence[tuple[bytes, int]]:
        """Return what was used since the last time."""
        (neighbour,) = self.others.poll()
        return neighbour.uses


@given(state=STATES)
def test_a_state_says_what_was_put_into_it(state: NotesState) -> None:
    assert NotesState.unpack(state.pack()) == state


def test_the_longest_state_fits() -> None:
    damaged = tuple(("ff" * 16, 2**32 - number) for number in range(1000))
    purges = tuple(f"{number:032x}" for number in range(1000))
    wants = WantNote("f" * 32, 1e12 / 3, -1e12 / 3)
    longest = NotesState("f" * 32, 2**62, 1e-300 / 3, wants, damaged, purges, 2**22, '"' * 64)
    packed = longest.pack()
    assert len(packed) == STATE_BYTES
    expected = replace(longest, damaged=damaged[-MAX_DAMAGED:], purges=purges[-MAX_PURGES:])
    assert NotesState.unpack(packed) == expected


@pytest.mark.parametrize("host", [5, None, "\x1b[31m", "a\nb", "\ud800", "h\u00f4te"])
def test_a_host_that_a_terminal_cannot_show_is_left_out(host: object) -> None:
    found = NotesState.unpack(seal_notes(json.dumps(DOCUMENT | {"host": host}).encode()))
    assert found is not None
    assert found.host == ""


def test_a_state_with_a_wrong_byte_or_cut_says_nothing() -> None:
    page = STATE.pack()
    length = len(page.rstrip(b"\0"))
    for at in range(length):
        assert NotesState.unpack(page[:at]) is None
        assert NotesState.unpack(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None


DOCUMENT: dict[str, Any] = {
    "version": 1, "namespace": NAMESPACE, "capacity_bytes": 1, "oldest_used_s": None, "wants": None, "damaged": [],
    "purges": [], "pid": 1, "host": "h",
}  # fmt: skip


def test_a_state_that_says_what_cannot_be_says_nothing() -> None:
    assert NotesState.unpack(seal_notes(json.dumps(DOCUMENT).encode())) is not None
    wrong: list[tuple[str, object]] = [
        ("version", 2), ("version", None), ("namespace", "../../etc"), ("namespace", 5), ("namespace", "abc"),
        ("capacity_bytes", -1), ("capacity_bytes", 2**64), ("capacity_bytes", True), ("capacity_bytes", 1.5),
        ("oldest_used_s", "now"), ("oldest_used_s", float("nan")), ("oldest_used_s", float("inf")),
        ("oldest_used_s", 10**300),
        ("wants", []), ("wants", [NAMESPACE, None, None]), ("wants", {"a": 1}), ("wants", 7), ("wants", [NAMESPACE, 1]),
        ("damaged", 5), ("damaged", [[NAMESPACE]]), ("damaged", [["zz", 1]]), ("damaged", [[NAMESPACE, -1]]),
        ("damaged", {"a": 1}),
        ("purges", [5]), ("purges", "abc"), ("purges", None), ("pid", "1"),
    ]  # fmt: skip
    for name, value in wrong:
        assert NotesState.unpack(seal_notes(json.dumps(DOCUMENT | {name: value}).encode())) is None, (
            name,
            value,
        )
    for name in DOCUMENT:
        missing = {key: value for key, value in DOCUMENT.items() if key != name}
        assert NotesState.unpack(seal_notes(json.dumps(missing).encode())) is None, name
    for data in (b"[" * 8000, b"", b"null", b"[]", b'"x"', b"\xff\xfe", b"1" * 8000):
        assert NotesState.unpack(seal_notes(data)) is None


def test_lists_of_a_hostile_state_are_cut() -> None:
    document = DOCUMENT | {"damaged": [["ab", 1]] * 200, "purges": ["ab"] * 200}
    found = NotesState.unpack(seal_notes(json.dumps(document, separators=(",", ":")).encode()))
    assert found is not None
    assert (len(found.damaged), len(found.purges)) == (MAX_DAMAGED, MAX_PURGES)


def test_others_read_what_a_process_says_last(root: Path) -> None:
    with Pair(root) as pair:
        for capacity_bytes in (1, 2, 3):
            pair.own.update(replace(STATE, capacity_bytes=capacity_bytes))
            (neighbour,) = pair.others.poll()
            assert neighbour.process == "own"
            assert neighbour.state.capacity_bytes == capacity_bytes
            assert neighbour.state.pid == os.getpid()


def test_a_process_does_not_read_its_own_notes(root: Path) -> None:
    own = OwnNotes(root, "own")
    own.update(STATE)
    others = OthersNotes(root, "own")
    assert others.poll() == []
    own.close()
    others.close()


def test_a_state_that_is_torn_is_taken_as_it_was_before(root: Path) -> None:
    with Pair(root) as pair:
        pair.others.poll()
        with (root / "own.notes").open("r+b") as file:
            file.seek(40)
            file.write(b"torn")
        assert pair.others.poll()[0].state.capacity_bytes == STATE.capacity_bytes


def test_uses_are_read_once_by_each_process_in_their_order(root: Path) -> None:
    chance = random.Random(3)
    with Pair(root) as pair:
        pair.own.add_uses([(PACK_IDS[0], 1)])
        assert pair.uses() == []  # what came before the first look is not of use any more
        for num_uses in (1, 2, 1000, 0, 3000, MAX_USES, 5):
            uses = [(chance.choice(PACK_IDS), chance.randrange(2**32)) for _ in range(num_uses)]
            pair.own.add_uses(uses)
            assert pair.uses() == uses
            assert pair.uses() == []


def test_of_more_uses_than_the_ring_holds_the_last_are_read(root: Path) -> None:
    with Pair(root) as pair:
        pair.uses()
        uses = [(PACK_IDS[0], number) for number in range(2 * MAX_USES + 100)]
        pair.own.add_uses(uses)
        assert pair.uses() == uses[-MAX_USES:]
        for number in range(3):
            pair.own.add_uses(uses[number * 2000 :][:2000])
        assert pair.uses() == uses[: 3 * 2000][-MAX_USES:]


def test_notes_that_were_removed_are_made_again(root: Path) -> None:
    with Pair(root) as pair:
        pair.others.poll()
        (root / "own.notes").unlink()
        assert pair.others.poll() == []
        pair.own.update(STATE)
        assert [one.process for one in pair.others.poll()] == ["own"]


def test_a_process_that_ends_takes_its_notes_with_it(root: Path) -> None:
    with Pair(root) as pair:
        assert len(pair.others.poll()) == 1
        pair.own.close()
        pair.own.close()
        assert pair.others.poll() == []
        assert list(root.iterdir()) == []


def lock_of(root: Path) -> AbstractContextManager[bool]:
    return DirectoryLock(root).held()


@pytest.mark.slow
def test_notes_of_a_killed_process_do_not_count_and_are_removed(root: Path) -> None:
    peer = Peer(root, "peer")
    with Pair(root) as pair:
        peer.ask("note")
        assert {one.process for one in pair.others.poll()} == {"own", "peer"}
        peer.ask("use", "01" * 8, 5, 2)
        assert pair.others.poll()[1].uses == [(b"\1" * 8, 5), (b"\1" * 8, 6)]
        pair.others.remove_dead(lambda: lock_of(root))
        assert len(pair.others.poll()) == 2
        peer.kill()
        assert [one.process for one in pair.others.poll()] == ["own"]
        assert (root / "peer.notes").exists()
        pair.others.remove_dead(lambda: lock_of(root))
        assert not (root / "peer.notes").exists()
        assert (root / "own.notes").exists()


def test_dead_notes_stay_while_another_process_keeps_the_lock(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "LOCK_WAIT_S", 1.0)
    (root / "dead.notes").write_bytes(STATE.pack())
    others = OthersNotes(root, "other")
    assert others.poll() == []
    with lock_of(root) as is_held:
        assert is_held
        refusing = DirectoryLock(root, clock=iter([0.0, 0.0, 9.0, 9.0]).__next__)
        others.remove_dead(refusing.held)
        assert (root / "dead.notes").exists()
    others.remove_dead(lambda: lock_of(root))
    assert not (root / "dead.notes").exists()
    others.close()


def test_files_that_are_no_notes_give_nothing_and_are_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "a1.notes")
    (root / "a2.notes").symlink_to(root / "target")
    (root / "a3.notes").mkdir()
    (root / "a4.notes").write_bytes(b"")
    (root / "a5.notes").write_bytes(random.Random(1).randbytes(100_000))
    (root / "UPPER.notes").write_bytes(STATE.pack())
    (root / ("x" * 33 + ".notes")).write_bytes(STATE.pack())
    others = OthersNotes(root, "other")
    assert others.poll() == []
    assert others.poll() == []
    others.remove_dead(lambda: lock_of(root))
    assert {path.name for path in root.glob("a*")} == {"a1.notes", "a2.notes", "a3.notes"}
    others.close()


@pytest.mark.parametrize("number", [2**64 - 1, 0, MAX_USES + 7])
def test_a_ring_with_a_hostile_number_gives_no_more_than_it_holds(root: Path, number: int) -> None:
    with Pair(root) as pair:
        pair.own.add_uses([(PACK_IDS[0], 1)] * 5)
        pair.uses()
        with (root / "own.notes").open("r+b") as file:
            file.seek(STATE_BYTES)
            file.write(number.to_bytes(8, "little"))
        assert len(pair.uses()) <= MAX_USES
        os.truncate(root / "own.notes", STATE_BYTES + 100)
        pair.uses()


def live(root: Path, faults: Faults) -> int:
    """Write notes and read them, each step twice where it fails; return how many steps succeeded."""
    num = 0
    own = None
    for _ in range(2):
        try:
            own = OwnNotes(root, "own", calls=faults.calls)
            break
        except OSError:
            continue
    assert own is not None
    others = OthersNotes(root, "other", calls=faults.calls)
    for number in range(3):
        for _ in range(2):
            try:
                own.update(replace(STATE, capacity_bytes=number))
                own.add_uses([(PACK_IDS[0], number)])
                num += 1
                break
            except OSError:
                continue
        others.poll()
    assert (others.poll() or others.poll())[0].state.capacity_bytes == 2
    own.close()
    others.close()
    return num


def test_each_call_may_fail_once(tmp_path: Path) -> None:
    faults = Faults()
    with no_file_stays_open(tmp_path):
        live(tmp_path, faults)
        for at in range(faults.num_calls):
            broken = Faults(at)
            assert live(tmp_path, broken) == 3, broken.failed
            for path in tmp_path.iterdir():
                assert broken.failed == "unlink"
                path.unlink()
