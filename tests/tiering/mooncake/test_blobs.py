"""The values of a real store keep the contract of named bytes."""

from pathlib import Path

import pytest
from tests.tiering.mooncake.conftest import Values
from tests.tiering.mooncake.fakes import ScriptedStore, make_settings
from tests.tiering.mooncake.live import KEPT_CLIENTS, LiveStore

from kvtier.testing.blobs_suite import NAMESPACE, OTHER_NAMESPACE, VALUE_BYTES, BlobsSuite, value_of
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.blobs import Blob, BlobKind, Blobs, PutKind, Target
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.mooncake.blobs import MooncakeBlobs, MooncakeNames
from kvtier.tiering.mooncake.descriptions import DESCRIPTION_NAMES
from kvtier.tiering.mooncake.errors import Code

ROW_BYTES = 4096
LONG_BYTES = 5 * 2**20


@pytest.mark.servers
class TestStore(BlobsSuite):
    """With a provider; what is removed waits for the ends of short leases."""

    @pytest.fixture(autouse=True)
    def _use_store(self, cleared_store: LiveStore, values: Values) -> None:
        del values  # cleared
        self.store = cleared_store

    def open(self, directory: Path) -> MooncakeBlobs:
        own = {
            "master": self.store.address,
            "admin_port": self.store.admin_port,
            "allow_any_interface": True,
        }
        return KEPT_CLIENTS.open_blobs(own)

    def test_what_is_there_stays_as_it_is(self, blobs: Blobs) -> None:
        self.put(blobs, 1, num_bytes=VALUE_BYTES - 1)
        # The library says the same of what it finds and of what it writes.
        assert self.put(blobs, 1, 2) == [PutKind.WRITTEN] * 2
        name = self.name(blobs, 1)
        assert blobs.sizes([name], is_lookup=False)[name].num_bytes == VALUE_BYTES - 1

    def test_a_long_value_is_written_and_read_as_a_page_is(self, tmp_path: Path) -> None:
        blobs = self.open(tmp_path)
        name = blobs.names.page(NAMESPACE)
        value = value_of(5, LONG_BYTES)
        assert [put.kind for put in blobs.put_new([Blob(name, [value], LONG_BYTES)], None)] == [
            PutKind.WRITTEN
        ]
        assert bytes(blobs.read_each([name], 2**26)[name]) == value
        assert bytes(blobs.read_each([name], 2**20, LONG_BYTES - 10)[name]) == value[-10:]
        blobs.close()

    def test_a_page_stays_when_the_blocks_of_its_namespace_are_removed(self, tmp_path: Path) -> None:
        blobs = self.open(tmp_path)
        page = blobs.names.page(NAMESPACE)
        self.put(blobs, 1)
        blobs.put_new([Blob(page, [b"page"], 4)], None)
        assert sum(removed.num_blocks for removed in blobs.remove_namespace(NAMESPACE, None)) == 1
        assert bytes(blobs.read_each([page], 10)[page]) == b"page"
        blobs.close()

    def test_a_value_of_another_length_among_descriptions_costs_its_own_only(self, tmp_path: Path) -> None:
        blobs = self.open(tmp_path)
        for name, value in zip(DESCRIPTION_NAMES, (b"x", value_of(1, 2**16)), strict=False):
            blobs.put_new([Blob(name, [value], len(value))], None)
        assert blobs.put_document(OTHER_NAMESPACE, "{}").kind is PutKind.WRITTEN
        assert blobs.list_namespaces() == [OTHER_NAMESPACE]
        assert blobs.remove([blobs.names.document(OTHER_NAMESPACE)]) == [
            blobs.names.document(OTHER_NAMESPACE)
        ]
        assert blobs.list_namespaces() == []
        blobs.close()


class RightTarget(Target):
    """Where a value goes; finds every value right or every one wrong."""

    __slots__ = ("is_right",)

    def __init__(self, memory: memoryview, *, is_right: bool) -> None:
        super().__init__("name", memory[:ENVELOPE_BYTES], memory[ENVELOPE_BYTES:VALUE_BYTES])
        self.is_right = is_right

    def landed(self, num_bytes: int, payload: Buffer | None = None) -> bool:
        return self.is_right


@pytest.mark.parametrize("is_right", [True, False])
def test_a_value_whose_lease_has_ended_is_a_fault_only_where_its_bytes_are_wrong(*, is_right: bool) -> None:
    blobs = MooncakeBlobs(make_settings(), None, ManualClock(), lambda _: ScriptedStore(Code.LEASE_EXPIRED))
    (got,) = blobs.get_into([RightTarget(memoryview(bytearray(VALUE_BYTES)), is_right=is_right)], None)
    assert (got.num_bytes, got.words) == ((VALUE_BYTES, "") if is_right else (0, "LEASE_EXPIRED (-707)"))


def test_what_stands_in_rows_and_in_lent_headers_is_sent_from_there_and_nothing_else_is_registered() -> None:
    native = ScriptedStore()
    rows = Rows(memoryview(bytearray(4 * ROW_BYTES)), ROW_BYTES)
    blobs = MooncakeBlobs(make_settings(), rows, ManualClock(), lambda _: native)
    with blobs.lend_headers(2, has_scratch=True) as lent:
        values = [(one.header, rows.row(1)) for one in lent] + [(lent[0].header, lent[0].scratch or b"")]
        blobs.put_new([Blob("name", parts, ENVELOPE_BYTES + ROW_BYTES) for parts in values], None)
    num_registered = len(native.registered_bytes)
    assert num_registered == 2
    blobs.put_new([Blob("page", [b"page"], 4)], None)
    assert native.registered_bytes[num_registered:] == [4]


def test_names_are_those_of_every_version() -> None:
    names = MooncakeNames()
    assert names.block(NAMESPACE, b"\x01\xff") == f"{NAMESPACE}/01ff"
    assert DESCRIPTION_NAMES[:2] == ("kvtier/namespaces/00", "kvtier/namespaces/01")
    assert names.parse(DESCRIPTION_NAMES[0]) is None
    assert names.parse(names.page(NAMESPACE)) == (BlobKind.PAGE, NAMESPACE, b"")
    assert names.parse("kvtier/reachable") is None
