"""One namespace of the tier, and the names of its blocks on the server."""

from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace


@dataclass(frozen=True, slots=True)
class ValkeySpace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Attributes:
        namespace: the identity of its blocks.
    """

    namespace: Namespace

    def block_name(self, key: OffloadKey) -> bytes:
        """Return the name under which the server has the block.

        The braces are a cluster's hash tag: what stands in them decides the node, so anything else that may ever
        be kept of one block goes to the same node, and blocks spread over all of them.
        """
        return f"kvtier:{{{self.namespace.name}:{key.hex()}}}".encode()
