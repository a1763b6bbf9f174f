"""What every backend of named bytes must do, as tests to inherit: subclass ``BlobsSuite`` and run pytest."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier.base import make_offload_key
from kvtier.tiering.kit.blobs import Blob, BlobKind, Blobs, Got, GotKind, PutKind, Target
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer

NAMESPACE = "0123456789abcdef" * 2
OTHER_NAMESPACE = "f" * 32
ROW_BYTES = 1000
VALUE_BYTES = ENVELOPE_BYTES + ROW_BYTES


class Parts:
    """The parts of a value; notes when they are made.

    Args:
        number: distinguishes values.
        order: gets the number when they are made.
    """

    def __init__(self, number: int, order: list[int]) -> None:
        self._number = number
        self._order = order

    def __iter__(self) -> Iterator[Buffer]:
        """Yield header and row."""
        self._order.append(self._number)
        value = value_of(self._number)
        yield value[:ENVELOPE_BYTES]
        yield memoryview(bytearray(value[ENVELOPE_BYTES:]))


class PlainTarget(Target):
    """Where a value goes; keeps what has landed."""

    __slots__ = ("length", "order", "row_then")

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__(name, memoryview(bytearray(ENVELOPE_BYTES)), memoryview(bytearray(ROW_BYTES)))
        self.order = order
        self.length = -1
        self.row_then = b""

    def landed(self, num_bytes: int, payload: Buffer | None = None) -> bool:
        self.order.append(self.name)
        self.length = num_bytes
        self.row_then = bytes(self.row if payload is None else payload)
        return num_bytes == VALUE_BYTES


def value_of(number: int, num_bytes: int = VALUE_BYTES) -> bytes:
    """Return the bytes of a value, distinct for each number. Pure."""
    return bytes((number + position) % 251 for position in range(num_bytes))


class BlobsSuite(ABC):
    """The contract of Blobs.

    Attributes:
        has_parts: whether the backend is of several servers, each of which gets its names of a call in their order.
    """

    has_parts: ClassVar[bool] = False

    @abstractmethod
    def open(self, directory: Path) -> Blobs:
        """Open the backend; all that are opened in one test are the same one."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Iterator[Blobs]:
        """Give the backend, and close it afterwards."""
        blobs = self.open(tmp_path)
        yield blobs
        blobs.close()

    def name(self, blobs: Blobs, number: int, namespace: str = NAMESPACE) -> str:
        """Return the name of a block."""
        return blobs.names.block(namespace, make_offload_key(number.to_bytes(32, "big"), 0))

    def put(self, blobs: Blobs, *numbers: int, num_bytes: int = VALUE_BYTES) -> list[PutKind]:
        """Write values; return how that ended."""
        values = [
            Blob(self.name(blobs, number), [value_of(number, num_bytes)], num_bytes) for number in numbers
        ]
        return [put.kind for put in blobs.put_new(values, None)]

    def get(self, blobs: Blobs, *numbers: int) -> list[tuple[PlainTarget, Got]]:
        """Read values."""
        order: list[str] = []
        targets = [PlainTarget(self.name(blobs, number), order) for number in numbers]
        found = blobs.get_into(targets, None)
        read = [target.name for target, got in zip(targets, found, strict=True) if got.num_bytes]
        assert (sorted(order) if self.has_parts else order) == read
        return list(zip(targets, found, strict=True))

    def test_names_are_distinct_and_say_what_they_are_of(self, blobs: Blobs) -> None:
        names = [
            self.name(blobs, number, space) for number in range(3) for space in (NAMESPACE, OTHER_NAMESPACE)
        ]
        assert len(set(names)) == 6
        for name in names:
            parsed = blobs.names.parse(name)
            assert parsed is not None
            assert parsed.kind is BlobKind.BLOCK
            assert blobs.names.block(parsed.namespace, parsed.block) == name
        for name, kind in (
            (blobs.names.document(NAMESPACE), BlobKind.DOCUMENT),
            (blobs.names.page(NAMESPACE), BlobKind.PAGE),
        ):
            assert blobs.names.parse(name) == (kind, NAMESPACE, b"")
        assert blobs.names.parse("notes.txt") is None

    def test_the_backend_passes_its_own_check(self, blobs: Blobs) -> None:
        blobs.check()

    def test_parts_are_made_once_and_in_order(self, blobs: Blobs) -> None:
        order: list[int] = []
        values = [Blob(self.name(blobs, number), Parts(number, order), VALUE_BYTES) for number in range(4)]
        assert order == []
        assert [put.kind for put in blobs.put_new(values, None)] == [PutKind.WRITTEN] * 4
        assert (sorted(order) if self.has_parts else order) == [0, 1, 2, 3]
        for number, (target, got) in enumerate(self.get(blobs, 0, 1, 2, 3)):
            assert got.kind is GotKind.READ
            assert bytes(target.header) + target.row_then == value_of(number)

    def test_what_is_there_stays_as_it_is(self, blobs: Blobs) -> None:
        self.put(blobs, 1, num_bytes=VALUE_BYTES - 1)
        (kind, other) = self.put(blobs, 1, 2)
        assert kind is PutKind.EXISTED
        assert other is PutKind.WRITTEN
        name = self.name(blobs, 1)
        assert blobs.sizes([name], is_lookup=False)[name].num_bytes == VALUE_BYTES - 1

    def test_what_is_absent_is_absent_and_the_others_come(self, blobs: Blobs) -> None:
        self.put(blobs, 1, 3)
        kinds = [got.kind for _, got in self.get(blobs, 1, 2, 3)]
        assert kinds == [GotKind.READ, GotKind.ABSENT, GotKind.READ]
        names = [self.name(blobs, number) for number in (1, 2, 3)]
        for is_lookup in (True, False):
            assert blobs.sizes(names, is_lookup=is_lookup).keys() == {names[0], names[2]}
        assert blobs.read_each(names, 10).keys() == {names[0], names[2]}

    @pytest.mark.parametrize(
        "num_bytes", [1, 127, 128, 129, VALUE_BYTES - 1, VALUE_BYTES + 1, 3 * VALUE_BYTES]
    )
    def test_a_value_of_another_length_tells_its_length_and_touches_no_row(
        self, blobs: Blobs, num_bytes: int
    ) -> None:
        self.put(blobs, 1, num_bytes=num_bytes)
        ((target, got),) = self.get(blobs, 1)
        assert (got.kind, got.num_bytes, target.length) == (GotKind.READ, num_bytes, num_bytes)
        assert not any(target.row)
        head = value_of(1, min(num_bytes, ENVELOPE_BYTES))
        assert bytes(target.header) == head.ljust(ENVELOPE_BYTES, b"\0") or not any(target.header)

    def test_beginnings_and_parts_of_values_are_read(self, blobs: Blobs) -> None:
        self.put(blobs, 1)
        name, value = self.name(blobs, 1), value_of(1)
        assert bytes(blobs.read_each([name], 100)[name]) == value[:100]
        assert bytes(blobs.read_each([name], 2 * VALUE_BYTES)[name]) == value
        assert bytes(blobs.read_each([name], 70, 50)[name]) == value[50:120]
        assert bytes(blobs.read_each([name], 70, VALUE_BYTES - 5)[name]) == value[-5:]
        assert not blobs.read_each([name], 70, 2 * VALUE_BYTES).get(name)

    def test_what_is_removed_is_gone_and_may_be_written_again(self, blobs: Blobs) -> None:
        self.put(blobs, 1, 2)
        assert self.name(blobs, 1) in blobs.remove([self.name(blobs, 1), self.name(blobs, 9)])
        assert [got.kind for _, got in self.get(blobs, 1, 2)] == [GotKind.ABSENT, GotKind.READ]
        blobs.remove([self.name(blobs, 1)])
        assert self.put(blobs, 1) == [PutKind.WRITTEN]

    def test_a_document_is_written_once_and_names_its_namespace(self, blobs: Blobs) -> None:
        assert blobs.put_document(NAMESPACE, '{"a": 1}').kind is PutKind.WRITTEN
        assert blobs.put_document(NAMESPACE, '{"a": 2}').kind is PutKind.EXISTED
        name = blobs.names.document(NAMESPACE)
        assert bytes(blobs.read_each([name], 100)[name]) == b'{"a": 1}'
        if blobs.can_list:
            assert NAMESPACE in blobs.list_namespaces()

    def test_everything_is_listed_and_one_namespace_can_be_removed(self, blobs: Blobs) -> None:
        if not blobs.can_list:
            return
        self.put(blobs, 1, 2)
        other = self.name(blobs, 1, OTHER_NAMESPACE)
        blobs.put_new([Blob(other, [value_of(1)], VALUE_BYTES)], None)
        blobs.put_document(NAMESPACE, "{}")
        own = {self.name(blobs, 1), self.name(blobs, 2)}
        assert {one.name for one in blobs.list_all()} >= own | {other, blobs.names.document(NAMESPACE)}
        of_namespace = {one.name: one.num_bytes for one in blobs.list_all(NAMESPACE)}
        assert all(of_namespace[name] >= VALUE_BYTES for name in own)
        assert other not in of_namespace
        assert sum(removed.num_blocks for removed in blobs.remove_namespace(NAMESPACE, None)) == 2
        left = {one.name for one in blobs.list_all()}
        assert not left & own
        assert left >= {other, blobs.names.document(NAMESPACE)}
