"""One namespace of the tier: its identity and the names of its blocks in the store."""

from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Space:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Attributes:
        namespace: the identity of its blocks.
    """

    namespace: Namespace

    def name_of(self, key: OffloadKey) -> str:
        """Return the name under which the store keeps the block of ``key``."""
        return f"{self.namespace.name}/{key.hex()}"
