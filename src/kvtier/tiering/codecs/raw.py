"""The codec that changes nothing: what is stored is the row."""

from kvtier.tiering.codecs.base import Codec

RAW_NUMBER = 0


class RawCodec(Codec):
    """Stores rows as they are, without a copy."""

    number = RAW_NUMBER

    def encode(self, row: memoryview) -> memoryview:
        """Return ``row`` itself."""
        return row

    def decode(self, stored: memoryview, row: memoryview) -> bool:
        """Copy ``stored`` into ``row``, unless it was read into it in the first place."""
        if len(stored) != len(row):
            return False
        if stored is not row:
            row[:] = stored
        return True
