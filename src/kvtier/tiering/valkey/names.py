"""The names under which servers have the values of the tier, and how to read them back.

A block is ``kvtier:{<namespace>:<name in hex>}``, its name being its key, or keyed bytes where blocks are encrypted,
and ``kvtier:{<namespace>}:namespace.json`` describes a namespace; ``kvtier:{<namespace>}:probe.page`` is its page.
The braces are a cluster's hash tag: what stands in them decides the node. Anything else that may ever be kept of one
block goes to the same node, and blocks spread over all of them.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.kit.block_format import BlockFormat, BlockName, format_of

LIST_NAME = b"kvtier:{namespaces}"
"""The namespaces written last, a sorted set by the time of that."""

_BLOCK = re.compile(rb"kvtier:\{([0-9a-f]{32}):((?:[0-9a-f]{2}){1,40})\}")
_DOCUMENT = re.compile(rb"kvtier:\{([0-9a-f]{32})\}:namespace\.json")
_PAGE = re.compile(rb"kvtier:\{[0-9a-f]{32}\}:probe\.page")


class ServerName(NamedTuple):
    """What the name of a block says."""

    namespace: str
    name: BlockName


def block_name(namespace_name: str, name: BlockName) -> bytes:
    """Return under which name a server has the block of that name, the key itself where blocks are plain. Pure."""
    return f"kvtier:{{{namespace_name}:{name.hex()}}}".encode()


def document_name(namespace_name: str) -> bytes:
    """Return the name of the description of a namespace. Pure."""
    return f"kvtier:{{{namespace_name}}}:namespace.json".encode()


def page_name(namespace_name: str) -> bytes:
    """Return the name of the page of a namespace. Pure."""
    return f"kvtier:{{{namespace_name}}}:probe.page".encode()


def is_beside_blocks(name: bytes) -> bool:
    """Return whether ``name`` is ours and that of no block. Pure."""
    return name == LIST_NAME or parse_document_name(name) is not None or _PAGE.fullmatch(name) is not None


def parse_block_name(name: bytes) -> ServerName | None:
    """Return what ``name`` says, None when it is not that of a block. Pure."""
    found = _BLOCK.fullmatch(name)
    return ServerName(found[1].decode(), bytes.fromhex(found[2].decode())) if found else None


def parse_document_name(name: bytes) -> str | None:
    """Return the namespace that ``name`` is the description of, None when it is none. Pure."""
    found = _DOCUMENT.fullmatch(name)
    return found[1].decode() if found else None


@dataclass(frozen=True, slots=True)
class ValkeyNamespace:
    """What a job needs to know of the namespace it was submitted in; a reset opens another one.

    Attributes:
        identity: what makes its blocks its own: model, layout, epoch.
        format: how they are written.
    """

    identity: Namespace
    format: BlockFormat = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of(self.identity))

    def block_name(self, key: OffloadKey) -> bytes:
        """Return the name under which the server has the block."""
        return block_name(self.identity.name, self.format.name(key))
