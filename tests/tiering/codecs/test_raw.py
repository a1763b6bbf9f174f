"""The raw codec stores rows as they are."""

import pytest

from kvtier.errors import UnknownNameError
from kvtier.tiering.codecs import CODECS
from kvtier.tiering.codecs.raw import RawCodec


def test_raw_is_found_by_name_and_an_unknown_codec_names_it() -> None:
    assert CODECS.resolve("raw") is RawCodec
    with pytest.raises(UnknownNameError, match="did you mean 'raw'"):
        CODECS.resolve("rwa")


def test_encoding_copies_nothing() -> None:
    row = memoryview(bytearray(b"row"))
    assert RawCodec().encode(row) is row


def test_decoding_gives_back_the_row() -> None:
    row = memoryview(bytearray(3))
    assert RawCodec().decode(memoryview(b"row"), row)
    assert bytes(row) == b"row"


def test_decoding_refuses_another_length_and_leaves_the_row_alone() -> None:
    row = memoryview(bytearray(b"row"))
    assert not RawCodec().decode(memoryview(b"ro"), row)
    assert bytes(row) == b"row"


def test_decoding_in_place_is_nothing_to_do() -> None:
    row = memoryview(bytearray(b"row"))
    assert RawCodec().decode(row, row)
    assert bytes(row) == b"row"
