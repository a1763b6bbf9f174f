"""The names under which servers have the values of the tier, and how to read them back.

A block is ``kvtier:{<namespace>:<name in hex>}``, its name being its key, or keyed bytes where blocks are encrypted,
and ``kvtier:{<namespace>}:namespace.json`` describes a namespace; ``kvtier:{<namespace>}:probe.page`` is its page.
The braces are a cluster's hash tag: what stands in them decides the node. Anything else that may ever be kept of one
block goes to the same node, and blocks spread over all of them.
"""

import re

from kvtier.tiering.kit.blobs import BlobKind, BlobName, BlobNames
from kvtier.tiering.kit.block_format import BlockName

LIST_NAME = "kvtier:{namespaces}"
"""The namespaces written last, a sorted set by the time of that."""

_NAME = re.compile(
    r"kvtier:\{([0-9a-f]{32})(?:\}:(namespace\.json|probe\.page)|:((?:[0-9a-f]{2}){1,40})\})", re.ASCII
)
_KINDS = {"namespace.json": BlobKind.DOCUMENT, "probe.page": BlobKind.PAGE}


class ValkeyNames(BlobNames):
    """What values are called."""

    def block(self, namespace: str, name: BlockName) -> str:
        return f"kvtier:{{{namespace}:{name.hex()}}}"

    def document(self, namespace: str) -> str:
        return f"kvtier:{{{namespace}}}:namespace.json"

    def page(self, namespace: str) -> str:
        return f"kvtier:{{{namespace}}}:probe.page"

    def parse(self, name: str) -> BlobName | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        namespace, other, digits = found.groups()
        if digits is None:
            return BlobName(_KINDS[other], namespace)
        return BlobName(BlobKind.BLOCK, namespace, bytes.fromhex(digits))
