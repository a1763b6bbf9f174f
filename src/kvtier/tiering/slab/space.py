"""One namespace of the tier, as jobs carry it along."""

from dataclasses import dataclass

from kvtier.namespace import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The identity of the blocks of one epoch; compared by identity, a reset opens another one.

    Attributes:
        namespace: the identity of its blocks.
    """

    namespace: Namespace
