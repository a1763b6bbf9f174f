"""One namespace of the tier: its identity, its place on the disk, and what is known of it."""

from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.fs import layout
from kvtier.tiering.fs.index import KeyIndex


@dataclass(frozen=True, slots=True)
class Space:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Attributes:
        namespace: the identity of its blocks.
        path: its folder.
        index: which blocks of it are on the disk.
    """

    namespace: Namespace
    path: str
    index: KeyIndex

    def block_path(self, key: OffloadKey) -> str:
        """Return where the block of ``key`` is."""
        return layout.block_path(self.path, key)
