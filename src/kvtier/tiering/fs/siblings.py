"""The other namespaces of a directory: whether one of them holds a block that this engine misses.

Content hashes name tokens, not bytes. So an engine whose dtype, RoPE or weights changed asks for keys that another
namespace holds, finds none, and nothing seems wrong. The lookup's thread, which has just found that a block is not on
the disk, looks into a few siblings for it; the scheduler's thread reads what it has found.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvtier.base import OffloadKey
from kvtier.errors import NamespaceDocumentError
from kvtier.misses import Miss, MissCause
from kvtier.namespace import differences
from kvtier.tiering.fs.folders import (
    FSNamespace,
    block_path,
    count_blocks,
    list_namespaces,
    read_document,
)

logger = logging.getLogger(__name__)

MAX_SIBLINGS = 8
"""Namespaces that are looked into, those changed last first. Each costs a system call for each block looked for."""

MAX_LOOKED_FOR = 4
"""Missing blocks of a lookup that are looked for in every sibling: the first ones, where a prefix ends. When one of
them is found, all blocks of that lookup are looked for there, so that requests behind it have a cause too."""

MAX_FOUND = 4096
"""Blocks remembered that a sibling holds, about 200 bytes each; the oldest is forgotten first."""

MAX_FIELDS = 4
"""Fields that a cause names; a namespace that differs in more is of another model."""

LISTING_S = 60.0
"""Seconds for which the list of siblings is used. Shorter lists a directory on a distant disk more often; longer
notices later that an engine with other settings has begun to write."""

MAX_COUNTED_BLOCKS = 1000


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another namespace of the directory.

    Attributes:
        path: its folder.
        miss: the cause of blocks that it holds: which fields of its identity differ.
    """

    path: str
    miss: Miss


class SiblingNamespaces:
    """Looks for missing blocks in the other namespaces of a directory.

    Mutable are the list of siblings, which the lookup's thread alone uses, and the blocks found, which it writes and
    the scheduler's thread reads; single operations of a dictionary are atomic.

    Args:
        root: the tier's directory.
        clock: seconds, monotonic.

    Attributes:
        found: blocks that this namespace misses and a sibling holds, with the cause; mostly empty.
    """

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._root = root
        self._clock = clock
        self._listed_s: float | None = None
        self._listed_for = ""
        self._siblings: list[Sibling] = []
        self.found: OrderedDict[OffloadKey, Miss] = OrderedDict()

    def look_for(self, namespace: FSNamespace, missing: Sequence[OffloadKey]) -> None:
        """Look for blocks that ``namespace`` lacks. Thread: the lookup's; blocks for some system calls."""
        if not missing:
            return
        self._list(namespace)
        for sibling in self._siblings:
            if any(_has(sibling, key) for key in missing[:MAX_LOOKED_FOR]):
                for key in missing:
                    if _has(sibling, key):
                        self.found[key] = sibling.miss
                while len(self.found) > MAX_FOUND:
                    self.found.popitem(last=False)
                return

    def explain(self, key: OffloadKey) -> Miss | None:
        """Return in what the namespace differs that holds ``key``; None when none of those looked into does."""
        return self.found.get(key)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks that this namespace holds by now. Thread: any."""
        for key in keys:
            self.found.pop(key, None)

    def _list(self, namespace: FSNamespace) -> None:
        is_first = self._listed_for != namespace.name
        now_s = self._clock()
        if not is_first and self._listed_s is not None and now_s - self._listed_s < LISTING_S:
            return
        self._listed_s, self._listed_for = now_s, namespace.name
        names = [name for name in list_namespaces(self._root) if name != namespace.name][:MAX_SIBLINGS]
        found = (_read(self._root / name, namespace) for name in names)
        self._siblings = [sibling for sibling in found if sibling is not None]
        if is_first and self._siblings and count_blocks(namespace.path, 1) == 0:
            _log_first(namespace, self._siblings[0])


def _read(path: Path, namespace: FSNamespace) -> Sibling | None:
    """Return a namespace with what distinguishes it; None when it cannot be read, or when only a reset does."""
    try:
        found = differences(read_document(path), namespace.identity.document)
    except (ValueError, NamespaceDocumentError):
        return None
    detail = {"namespace": path.name[:8]}
    for one in found[:MAX_FIELDS]:
        detail[one.field] = f"{one.value_a} (here {one.value_b})"
    if len(found) > MAX_FIELDS:
        detail["more"] = f"{len(found) - MAX_FIELDS} fields more"
    return Sibling(str(path), Miss(MissCause.OTHER_NAMESPACE, "fs", MappingProxyType(detail)))


def _has(sibling: Sibling, key: OffloadKey) -> bool:
    return os.access(block_path(sibling.path, key), os.F_OK)


def _log_first(namespace: FSNamespace, sibling: Sibling) -> None:
    num_blocks = count_blocks(sibling.path, MAX_COUNTED_BLOCKS)
    fields = [f"{name} {value}" for name, value in sibling.miss.detail.items() if name != "namespace"]
    logger.info(
        "tier fs: namespace %s holds nothing here; %s has %s blocks and differs in %s",
        namespace.name[:8],
        sibling.miss.detail["namespace"],
        num_blocks if num_blocks < MAX_COUNTED_BLOCKS else f"{num_blocks} or more",
        ", ".join(fields) or "nothing that is written down",
    )
