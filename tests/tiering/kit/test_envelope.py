"""A header has the documented bytes, and no change of header or payload passes its check."""

import hashlib
import struct
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.forged_blocks import with_codec

from kvtier.base import OffloadKey
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit import envelope
from kvtier.tiering.kit.envelope import Envelope, HeaderCheck, check_block, make_header, unpack

NAMESPACE = hashlib.sha256(b"namespace").digest()
KEY = OffloadKey(bytes(range(36)))
PAYLOAD = bytes(range(256)) * 8


def header_of(payload: bytes = PAYLOAD) -> bytes:
    """Return the header of ``payload``."""
    return make_header(KEY, NAMESPACE, payload)


def test_the_128_bytes_are_where_the_format_says() -> None:
    header = make_header(KEY, NAMESPACE, PAYLOAD, raw_bytes=4096, generation=9)
    assert len(header) == envelope.ENVELOPE_BYTES == 128
    assert header[:4] == b"KVTB"
    assert struct.unpack_from("<HH", header, 4) == (envelope.VERSION, envelope.RAW_CODEC)
    assert header[8:24] == NAMESPACE[:16]
    assert struct.unpack_from("<H", header, 24) == (36,)
    assert header[26:66] == KEY + bytes(4)
    assert struct.unpack_from("<QQ", header, 66) == (len(PAYLOAD), 4096)
    assert header[82:98] == xxhash.xxh3_128_digest(PAYLOAD)
    assert struct.unpack_from("<I", header, 98) == (envelope.NO_ENCRYPTION,)
    assert header[102:114] == bytes(12)
    assert header[114:120] == (9).to_bytes(6, "little")
    assert struct.unpack_from("<Q", header, 120) == (xxhash.xxh3_64_intdigest(header[:120]),)


def test_what_was_packed_is_unpacked() -> None:
    header = make_header(KEY, NAMESPACE, PAYLOAD, raw_bytes=99, generation=2)
    checksum = xxhash.xxh3_128_digest(PAYLOAD)
    assert unpack(header) == Envelope(
        NAMESPACE[:16], KEY, 0, len(PAYLOAD), 99, checksum, key_id=0, nonce=bytes(12), generation=2
    )


def test_a_whole_block_is_accepted_also_from_a_page_and_a_memoryview() -> None:
    page = header_of() + bytes(4096 - 128)
    assert check_block(page, memoryview(PAYLOAD), KEY, NAMESPACE) is HeaderCheck.OK


@given(st.integers(0, 8 * 128 - 1))
def test_any_flipped_bit_of_the_header_is_no_hit(bit: int) -> None:
    header = bytearray(header_of())
    header[bit // 8] ^= 1 << bit % 8
    found = check_block(header, PAYLOAD, KEY, NAMESPACE)
    assert found is (HeaderCheck.OTHER_VERSION if 4 <= bit // 8 < 6 else HeaderCheck.DAMAGED)


@given(st.integers(0, 8 * len(PAYLOAD) - 1))
def test_any_flipped_bit_of_the_payload_is_damage(bit: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[bit // 8] ^= 1 << bit % 8
    assert check_block(header_of(), payload, KEY, NAMESPACE) is HeaderCheck.DAMAGED


@given(st.binary(max_size=300))
def test_random_bytes_are_damage_and_never_raise(header: bytes) -> None:
    assert check_block(header, PAYLOAD, KEY, NAMESPACE) in {HeaderCheck.DAMAGED, HeaderCheck.OTHER_VERSION}


@pytest.mark.parametrize("length", [0, 1, 127])
def test_a_header_cut_short_is_damage(length: int) -> None:
    assert unpack(header_of()[:length]) is HeaderCheck.DAMAGED


def test_a_payload_of_another_length_is_damage() -> None:
    assert check_block(header_of(), PAYLOAD[:-1], KEY, NAMESPACE) is HeaderCheck.DAMAGED


def test_another_namespace_key_or_codec_is_told_apart() -> None:
    other = hashlib.sha256(b"other").digest()
    assert check_block(header_of(), PAYLOAD, KEY, other) is HeaderCheck.OTHER_NAMESPACE
    assert check_block(header_of(), PAYLOAD, OffloadKey(KEY[:-1] + b"x"), NAMESPACE) is HeaderCheck.OTHER_KEY
    assert check_block(header_of(), PAYLOAD, OffloadKey(KEY[:-1]), NAMESPACE) is HeaderCheck.OTHER_KEY
    assert check_block(with_codec(header_of(), 1), PAYLOAD, KEY, NAMESPACE) is HeaderCheck.OTHER_CODEC


def test_an_encrypted_block_is_left_to_engines_that_have_its_key() -> None:
    header = bytearray(header_of())
    struct.pack_into("<I", header, 98, 7)
    struct.pack_into("<Q", header, 120, xxhash.xxh3_64_intdigest(bytes(header[:120])))
    assert check_block(header, PAYLOAD, KEY, NAMESPACE) is HeaderCheck.ENCRYPTED
    assert envelope.FAILURE_OF_CHECK[HeaderCheck.ENCRYPTED] is TierFailure.FOREIGN


def test_a_later_version_is_left_to_its_owner() -> None:
    header = bytearray(header_of())
    struct.pack_into("<H", header, 4, envelope.VERSION + 1)
    assert unpack(header) is HeaderCheck.OTHER_VERSION


def test_a_whole_header_with_an_impossible_key_length_is_damage() -> None:
    header = bytearray(header_of())
    struct.pack_into("<H", header, 24, 41)
    struct.pack_into("<Q", header, 120, xxhash.xxh3_64_intdigest(bytes(header[:120])))
    assert unpack(header) is HeaderCheck.DAMAGED


def test_the_longest_key_fits() -> None:
    key = OffloadKey(bytes(40))
    unpacked = unpack(make_header(key, NAMESPACE, b""))
    assert isinstance(unpacked, Envelope)
    assert unpacked.key == key


def test_without_xxhash_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['xxhash'] = None; import kvtier.tiering.kit.envelope"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install '.[fs]'" in done.stderr
