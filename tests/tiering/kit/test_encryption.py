"""Encrypted blocks open with their key under their name alone, no nonce comes twice, and names need the ring."""

import multiprocessing
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, make_offload_key
from kvtier.errors import ConfigError, TierError
from kvtier.namespace import Namespace
from kvtier.tenants import tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Envelope, HeaderCheck, make_header, unpack
from kvtier.tiering.kit.key_ring import (
    add_entry,
    drop_tenant,
    make_ring,
    read_ring,
    require_entry,
    write_ring,
)
from kvtier.tiering.kit.living_ring import CHECK_S, LivingRing

pytest.importorskip("cryptography")

from kvtier.tiering.kit import encryption
from kvtier.tiering.kit.encryption import (
    CHECKED_PIECE_BYTES,
    BlockOpener,
    EncryptedFormat,
    encrypt_namespace,
)
from kvtier.tiering.kit.keyed_names import BlockNames

ACME = tenant_number("acme")
IDENTITY = Namespace('{"tenant": "0123", "model": {"name": "m"}}', bytes(range(32)))
ROW = memoryview(bytearray(os.urandom(8192)))
KEY = make_offload_key(bytes(32), 0)
OF_ACME = make_offload_key(bytes(32), 0, ACME)
OF_OTHER = make_offload_key(bytes(32), 0, tenant_number("other"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a ring with a default entry and one of a tenant."""
    path = tmp_path / "ring.json"
    write_ring(path, add_entry(add_entry(make_ring(), None, 1.0), "acme", 1.0))
    return path


def open_format(
    path: Path, tenant: str | None = None, clock: Callable[[], float] = lambda: 0.0
) -> EncryptedFormat:
    """Return the format of an engine's blocks."""
    found = encrypt_namespace(IDENTITY, LivingRing(path, clock), tenant).format
    assert isinstance(found, EncryptedFormat)
    return found


def opened(
    block_format: EncryptedFormat, header: bytes, payload: bytes, key: OffloadKey = KEY
) -> HeaderCheck:
    """Open a block, and require that its bytes are there exactly when it is right."""
    row = memoryview(bytearray(b"\7" * len(payload)))
    found = block_format.open(header, payload, key, row)
    assert (row == ROW) == (found is HeaderCheck.OK)
    return found


def test_another_process_opens_what_one_has_sealed_also_in_place(path: Path) -> None:
    header, payload = open_format(path).seal(KEY, ROW, None)
    assert len(header) == ENVELOPE_BYTES
    assert bytes(payload) != bytes(ROW)
    row = memoryview(bytearray(payload))
    assert open_format(path).open(header, row, KEY, row) is HeaderCheck.OK
    assert row == ROW


def test_any_flipped_bit_of_header_or_payload_is_no_hit(path: Path) -> None:
    block_format = open_format(path)
    header, payload = block_format.seal(KEY, ROW, None, generation=3)
    for number in range(ENVELOPE_BYTES):
        changed = bytearray(header)
        changed[number] ^= 1
        assert opened(block_format, bytes(changed), bytes(payload)) is not HeaderCheck.OK
    for number in (0, 4095, 8191):
        changed = bytearray(payload)
        changed[number] ^= 128
        assert opened(block_format, header, bytes(changed)) is HeaderCheck.DAMAGED


def test_any_changed_field_is_no_hit_although_the_header_has_a_right_checksum(path: Path) -> None:
    import xxhash

    block_format = open_format(path)
    header, payload = block_format.seal(KEY, ROW, None, generation=3)
    for number in range(6, 120):
        changed = bytearray(header)
        changed[number] ^= 1
        changed[120:] = xxhash.xxh3_64_intdigest(bytes(changed[:120])).to_bytes(8, "little")
        assert opened(block_format, bytes(changed), bytes(payload)) is not HeaderCheck.OK, number


def test_a_block_of_another_name_length_or_namespace_is_no_hit(path: Path) -> None:
    block_format = open_format(path)
    header, payload = block_format.seal(KEY, ROW, None)
    assert opened(block_format, header, bytes(payload), OF_OTHER) is HeaderCheck.OTHER_KEY
    assert opened(block_format, header, bytes(payload)[:-1]) is HeaderCheck.DAMAGED
    assert opened(block_format, header[:100], bytes(payload)) is HeaderCheck.DAMAGED
    other = encrypt_namespace(Namespace("{}", b"x" * 32), LivingRing(path), None).format
    assert other.open(header, payload, KEY, memoryview(bytearray(8192))) is HeaderCheck.OTHER_KEY


def test_a_mounted_ring_is_read_again_when_its_link_leads_elsewhere(path: Path, tmp_path: Path) -> None:
    now_s = 0.0
    mounted, data = tmp_path / "mounted.json", tmp_path / "..data"
    (tmp_path / "new").mkdir()
    write_ring(tmp_path / "new" / path.name, add_entry(read_ring(path), None, 2.0))
    data.symlink_to(path.parent)
    mounted.symlink_to(f"..data/{path.name}")
    ring = LivingRing(mounted, lambda: now_s)
    data.unlink()
    data.symlink_to("new")
    now_s = 2 * CHECK_S
    ring.refresh()
    assert ring.ring == read_ring(tmp_path / "new" / path.name)


def test_a_plain_block_is_refused(path: Path) -> None:
    block_format = open_format(path)
    for key in (KEY, OffloadKey(block_format.name(KEY))):
        header = make_header(key, block_format.digest, ROW)
        assert opened(block_format, header, bytes(ROW)) is HeaderCheck.NOT_ENCRYPTED


def test_a_forger_without_the_secret_is_refused(path: Path, tmp_path: Path) -> None:
    block_format = open_format(path)
    ring = read_ring(path)
    forged = add_entry(make_ring(), None, 1.0)
    write_ring(tmp_path / "forged", type(forged)(ring.names_secret, forged.entries, 9))
    header, payload = open_format(tmp_path / "forged").seal(KEY, ROW, None)
    assert opened(block_format, header, bytes(payload)) is HeaderCheck.DAMAGED


def test_tenants_have_keys_of_their_own(path: Path) -> None:
    block_format = open_format(path)
    numbers = {}
    for key in (KEY, OF_ACME, OF_OTHER):
        header, payload = block_format.seal(key, ROW, None)
        envelope = unpack(header)
        assert isinstance(envelope, Envelope)
        numbers[key] = envelope.key_id
        assert opened(block_format, header, bytes(payload), key) is HeaderCheck.OK
    assert numbers == {KEY: 1, OF_ACME: 2, OF_OTHER: 1}


def test_an_engines_own_tenant_has_its_entry(path: Path) -> None:
    header, payload = open_format(path, "acme").seal(KEY, ROW, None)
    envelope = unpack(header)
    assert isinstance(envelope, Envelope)
    assert envelope.key_id == 2
    assert opened(open_format(path), header, bytes(payload)) is HeaderCheck.DROPPED_KEY_ID, "not its tenant's"


def test_without_a_default_a_tenant_without_an_entry_is_not_served(path: Path) -> None:
    ring = add_entry(make_ring(), "acme", 1.0)
    write_ring(path, ring)
    block_format = open_format(path)
    assert [block_format.serves(key) for key in (KEY, OF_ACME, OF_OTHER)] == [False, True, False]
    with pytest.raises(TierError):
        block_format.seal(OF_OTHER, ROW, None)


def test_a_tenant_or_ring_without_an_entry_ends_the_start(path: Path) -> None:
    with pytest.raises(ConfigError, match="no entry of this tenant"):
        require_entry(read_ring(path), "unknown")
    with pytest.raises(ConfigError, match="kvtier keys rotate"):
        require_entry(make_ring(), None)
    require_entry(add_entry(make_ring(), "acme", 1.0), None)


def test_after_a_rotation_old_blocks_are_read_and_new_ones_have_the_new_key(path: Path) -> None:
    header, payload = open_format(path).seal(KEY, ROW, None)
    write_ring(path, add_entry(read_ring(path), None, 2.0))
    block_format = open_format(path)
    assert opened(block_format, header, bytes(payload)) is HeaderCheck.OK
    envelope = unpack(block_format.seal(KEY, ROW, None).header)
    assert isinstance(envelope, Envelope)
    assert envelope.key_id == 3


def test_a_living_engine_notices_a_drop_and_reads_nothing_of_the_tenant(path: Path) -> None:
    clock = ManualClock()
    block_format = open_format(path, clock=clock)
    header, payload = block_format.seal(OF_ACME, ROW, None)
    assert opened(block_format, header, bytes(payload), OF_ACME) is HeaderCheck.OK
    write_ring(path, drop_tenant(read_ring(path), "acme"))
    clock.advance(CHECK_S)
    block_format.refresh()
    assert not block_format.serves(OF_ACME), "the default does not stand in for a dropped tenant"
    assert block_format.serves(KEY)
    assert opened(block_format, header, bytes(payload), OF_ACME) is not HeaderCheck.OK
    with pytest.raises(TierError):
        block_format.seal(OF_ACME, ROW, None)


def test_a_tenant_who_comes_back_has_a_new_key_and_his_old_blocks_make_room(path: Path) -> None:
    header, payload = open_format(path).seal(OF_ACME, ROW, None)
    write_ring(path, add_entry(drop_tenant(read_ring(path), "acme"), "acme", 2.0))
    block_format = open_format(path)
    assert block_format.serves(OF_ACME)
    assert opened(block_format, header, bytes(payload), OF_ACME) is HeaderCheck.DROPPED_KEY_ID


def test_an_engine_leaves_alone_what_a_newer_ring_has_written(path: Path) -> None:
    block_format = open_format(path)
    write_ring(path, add_entry(read_ring(path), None, 2.0))
    header, payload = open_format(path).seal(KEY, ROW, None)
    assert opened(block_format, header, bytes(payload)) is HeaderCheck.UNKNOWN_KEY_ID


@pytest.mark.parametrize("harm", ["gone", "open to others", "garbage", "another ring"])
def test_a_ring_that_goes_bad_stops_everything_until_it_is_back(path: Path, harm: str) -> None:
    clock = ManualClock()
    block_format = open_format(path, clock=clock)
    header, payload = block_format.seal(KEY, ROW, None)
    before = read_ring(path)
    if harm == "gone":
        path.unlink()
    elif harm == "open to others":
        path.chmod(0o644)
    elif harm == "garbage":
        path.write_text("{")
    else:
        write_ring(path, add_entry(make_ring(), None, 1.0))
    for _ in range(2):
        clock.advance(CHECK_S)
        block_format.refresh()
        assert not block_format.serves(KEY)
        assert opened(block_format, header, bytes(payload)) is not HeaderCheck.OK
    write_ring(path, before)
    clock.advance(CHECK_S)
    block_format.refresh()
    assert opened(block_format, header, bytes(payload)) is HeaderCheck.OK


def draw_nonces(path: Path, num: int) -> list[tuple[int, bytes]]:
    """Return what makes the nonce of each of ``num`` blocks that a new engine seals: key id, salt and counter."""
    block_format = open_format(path)
    return nonces_of(block_format, num)


def nonces_of(block_format: EncryptedFormat, num: int) -> list[tuple[int, bytes]]:
    """Return the same of an engine that runs."""
    row = ROW[:16]
    found = [unpack(block_format.seal(KEY, row, None).header) for _ in range(num)]
    return [(one.key_id, one.nonce) for one in found if isinstance(one, Envelope)]


def _draw(path: str, queue: "multiprocessing.Queue[list[tuple[int, bytes]]]") -> None:
    queue.put(draw_nonces(Path(path), 200))


@pytest.mark.slow
def test_no_nonce_comes_twice_over_threads_engines_restarts_and_processes(path: Path) -> None:
    shared = open_format(path)
    found: list[tuple[int, bytes]] = []
    threads = [threading.Thread(target=lambda: found.extend(nonces_of(shared, 200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        found += draw_nonces(path, 200)
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[tuple[int, bytes]]] = context.Queue()
    children = [context.Process(target=_draw, args=(str(path), queue)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in children:
        found += queue.get(timeout=60)
    for child in children:
        child.join(60)
    assert len(found) == len(set(found)) == 200 * (4 + 3 + 2)


def test_a_forks_child_draws_another_salt(path: Path) -> None:
    block_format = open_format(path)
    before = nonces_of(block_format, 3)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, nonces_of(block_format, 1)[0][1])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    of_child = os.read(reader, 100)
    os.close(reader)
    os.close(writer)
    of_parent = [nonce for _, nonce in before + nonces_of(block_format, 3)]
    assert len(of_child) == 20
    assert of_child[:16] not in {nonce[:16] for nonce in of_parent}


def test_a_salt_is_renewed_before_its_counter_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "MAX_COUNTER", 4)
    found = draw_nonces(path, 12)
    assert len(set(found)) == 12
    assert len({nonce[:16] for _, nonce in found}) == 3


def test_names_are_a_permutation_that_needs_the_ring() -> None:
    names, others = BlockNames(bytes(32), b"n" * 16), BlockNames(b"\1" * 32, b"n" * 16)
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(500)]
    found = {names.name(key) for key in keys}
    assert len(found) == 500
    assert not found & {others.name(key) for key in keys}
    assert not found & {BlockNames(bytes(32), b"m" * 16).name(key) for key in keys}
    assert all(len(name) == 36 for name in found)
    assert len({name[-4:] for name in found}) > 490, "tenant and group do not show either"


@given(st.binary(min_size=1, max_size=40))
def test_a_name_leads_back_to_its_key(key: bytes) -> None:
    names = BlockNames(b"\5" * 32, b"n" * 16)
    assert names.key(names.name(OffloadKey(key))) == key


def test_a_namespace_has_a_name_that_needs_the_ring_and_no_tag_of_a_salt(path: Path, tmp_path: Path) -> None:
    found = encrypt_namespace(IDENTITY, LivingRing(path), None)
    assert found.name != IDENTITY.name
    assert found.name == encrypt_namespace(IDENTITY, LivingRing(path), "acme").name
    assert "tenant" not in found.document
    assert '"name": "m"' in found.document
    other = tmp_path / "other"
    write_ring(other, add_entry(make_ring(), None, 1.0))
    assert found.name != encrypt_namespace(IDENTITY, LivingRing(other), None).name


def test_checking_a_block_takes_no_second_one_of_memory(path: Path) -> None:
    row = memoryview(bytearray(5 * CHECKED_PIECE_BYTES + 7))
    header, payload = open_format(path).seal(OF_ACME, row, None)
    opener = BlockOpener(read_ring(path))
    tracemalloc.start()
    try:
        assert opener.open(header, payload) is HeaderCheck.OK
        assert tracemalloc.get_traced_memory()[1] < 2 * CHECKED_PIECE_BYTES
    finally:
        tracemalloc.stop()
    flipped = bytearray(payload)
    flipped[-1] ^= 1
    assert opener.open(header, flipped) is HeaderCheck.DAMAGED


def test_a_ring_opens_blocks_without_an_engine_and_says_whose_they_are(path: Path) -> None:
    header, payload = open_format(path).seal(OF_ACME, ROW, None)
    opener = BlockOpener(read_ring(path))
    envelope = unpack(header)
    assert isinstance(envelope, Envelope)
    assert opener.tenant_number(envelope) == ACME
    assert opener.open(header, payload) is HeaderCheck.OK
    assert opener.opens_with_any(header, payload)
    dropped = BlockOpener(drop_tenant(read_ring(path), "acme"))
    assert dropped.tenant_number(envelope) == ACME
    assert dropped.open(header, payload) is HeaderCheck.UNKNOWN_KEY_ID
    assert not dropped.opens_with_any(header, payload)
