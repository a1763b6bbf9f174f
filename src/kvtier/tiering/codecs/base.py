"""The contract of a codec, and the table of their names.

It encodes nothing. The envelope of a stored block carries the codec's number, so a reader knows what it has
in front of it whatever it was configured with.
"""

from abc import ABC, abstractmethod

from kvtier.registry import Registry


class Codec(ABC):
    """A reversible encoding of one row; stateless, so any thread may use it.

    Attributes:
        number: what the envelope carries; never re-used for another encoding.
    """

    number: int

    @abstractmethod
    def encode(self, row: memoryview) -> memoryview:
        """Return the bytes to store.

        Args:
            row: the row's bytes, format 'B', not to be changed.

        Returns:
            A buffer that may be ``row`` itself; valid as long as the row is.
        """

    @abstractmethod
    def decode(self, stored: memoryview, row: memoryview) -> bool:
        """Write the decoded bytes into ``row``; False when ``stored`` does not decode to its length."""


CODECS: Registry[type[Codec]] = Registry("codec", {"raw": "kvtier.tiering.codecs.raw:RawCodec"})
