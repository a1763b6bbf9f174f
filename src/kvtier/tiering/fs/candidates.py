"""Which files of a directory leave first: of tenants beyond their quotas, then what was used longest ago.

A walk keeps the files that were used longest ago, and where tenants have quotas also the oldest of each tenant that
keeps more than half of its quota. What this tier writes after it is known too, so that a tenant whose blocks are all
newer than the walk gives its own. Of several tenants beyond their quotas the one that is most beyond gives next, each
only until it keeps its quota. What a tenant is still writing beyond its quota takes the place of no other tenant's
block.
"""

import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import NamespaceDocumentError
from kvtier.namespace import LAYOUT_VERSION, parse_document
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.folders import BlockFile, FSNamespace, namespace_of, read_document
from kvtier.tiering.fs.tenant_usage import TenantTable, TenantUsage

MAX_CANDIDATES = 32_768
"""Files remembered from a walk as the next to go, about 300 bytes each; as many again of tenants near their quotas.
Fewer walk more often."""

MAX_NEAR_TENANTS = 512
"""Tenants whose oldest files a walk remembers. Of more, those less beyond their quotas wait for a later walk."""


class Candidates:
    """The files that leave next. Used from the evictor's thread.

    Args:
        directory: where they are.
        current_namespace: returns the namespace of the tier's present jobs.
    """

    def __init__(self, directory: FSDirectory, current_namespace: Callable[[], FSNamespace]) -> None:
        expiry, usage = directory.expiry, directory.tenants
        self._used_ns: Callable[[BlockFile], int] = expiry.used_ns if expiry else attrgetter("mtime_ns")
        self._oldest: list[BlockFile] = []
        self._of_tenants = None if usage is None else _TenantFiles(usage, directory.root, current_namespace)

    def choose(self, blocks: Iterable[BlockFile], *, is_recount: bool) -> int:
        """Remember those of ``blocks``, every one of the directory, that leave next; return how many that are.

        Args:
            blocks: what a walk yields.
            is_recount: whether what it finds of each tenant is to be counted; ``end_recount`` does that.
        """

        def order(block: BlockFile) -> tuple[int, str]:
            return self._used_ns(block), block.path

        if self._of_tenants is not None:
            blocks = self._of_tenants.choose(blocks, order, is_recount=is_recount)
        self._oldest = heapq.nsmallest(MAX_CANDIDATES, blocks, key=order)[::-1]
        if self._of_tenants is not None:
            self._of_tenants.end_choice(order)
        return len(self._oldest)

    def begin_round(self) -> None:
        """Compare what tenants keep with their quotas, for the eviction that begins."""
        if self._of_tenants is not None:
            self._of_tenants.begin_round()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of what the last walk has found."""
        return not self._oldest

    def is_lacking(self) -> bool:
        """Return whether a tenant is beyond its quota, of whose blocks none is known."""
        return self._of_tenants is not None and self._of_tenants.is_lacking()

    def pop(self, wanted_bytes: int, *, may_walk: bool) -> BlockFile | None:
        """Return the next to leave, None when there is none.

        Args:
            wanted_bytes: what has to go, this one included.
            may_walk: whether a walk can find the blocks of a tenant that is beyond its quota, when none is known.
        """
        if self._of_tenants is not None:
            block = self._of_tenants.pop()
            if block is not None or wanted_bytes <= self._of_tenants.writing_beyond_bytes:
                return block
            if may_walk and self._of_tenants.is_lacking():
                return None
        return self._oldest.pop() if self._oldest else None

    def on_evicted(self, block: BlockFile, num_bytes: int) -> None:
        """Count what a block that was popped has given; 0 when it stays or was gone."""
        if self._of_tenants is not None:
            self._of_tenants.on_evicted(block, num_bytes)

    def end_recount(self) -> None:
        """Correct what the shared table says of tenants, after a whole walk that was a recount."""
        if self._of_tenants is not None:
            self._of_tenants.end_recount()


class _TenantFiles:
    """The oldest files of tenants near or beyond their quotas.

    Attributes:
        writing_beyond_bytes: what is being written beyond quotas.
    """

    def __init__(self, usage: TenantUsage, root: Path, current_namespace: Callable[[], FSNamespace]) -> None:
        self._usage = usage
        self._root = root
        self._current_namespace = current_namespace
        self._tells_tenants: dict[str, bool] = {}
        self._files: dict[int, list[BlockFile]] = {}
        self._excess: dict[int, int] = {}
        self._found_bytes: Counter[int] = Counter()
        self._begun: TenantTable | None = None
        self.writing_beyond_bytes = 0

    def choose(
        self,
        blocks: Iterable[BlockFile],
        order: Callable[[BlockFile], tuple[int, str]],
        *,
        is_recount: bool,
    ) -> Iterator[BlockFile]:
        """Yield ``blocks``, and remember those of tenants on the way."""
        self._begun = self._usage.begin_recount() if is_recount else None
        self._usage.forget_recent()
        self._tells_tenants = {}
        self._found_bytes = Counter()
        near = self._usage.list_near()[:MAX_NEAR_TENANTS]
        most = MAX_CANDIDATES // max(1, len(near))
        self._files = {number: [] for number in near}
        for block in blocks:
            number = self.tenant_of(block)
            if number is not None:
                self._found_bytes[number] += block.num_bytes
                files = self._files.get(number)
                if files is not None:
                    files.append(block)
                    if len(files) >= 2 * most:
                        files.sort(key=order)
                        del files[most:]
            yield block

    def end_choice(self, order: Callable[[BlockFile], tuple[int, str]]) -> None:
        """Put the files of each tenant into their order, the oldest last."""
        most = MAX_CANDIDATES // max(1, len(self._files))
        for files in self._files.values():
            files.sort(key=order)
            del files[most:]
            files.reverse()

    def end_recount(self) -> None:
        """Correct the shared table by what the walk has found, if it is a recount."""
        if self._begun is not None:
            self._usage.recount(self._found_bytes, self._begun)
            self._begun = None

    def tenant_of(self, block: BlockFile) -> int | None:
        """Return the number of a block's tenant; None where its name does not tell.

        That is in encrypted namespaces of others, and in those of another layout.
        """
        name, own = namespace_of(block.path), self._current_namespace()
        if name == own.name:
            return get_offload_tenant(own.format.key(block.name))
        does_tell = self._tells_tenants.get(name)
        if does_tell is None:
            does_tell = self._tells_tenants[name] = _tells_tenants(read_document(self._root / name))
        return get_offload_tenant(OffloadKey(block.name)) if does_tell else None

    def begin_round(self) -> None:
        """Compare what tenants keep with their quotas, and find what was written of those without known blocks."""
        self._excess, self.writing_beyond_bytes = self._usage.plan_evictions()
        lacking = {number for number in self._excess if not self._files.get(number)}
        if lacking:
            self._find_recent(lacking)

    def is_lacking(self) -> bool:
        return any(not self._files.get(number) for number in self._excess)

    def pop(self) -> BlockFile | None:
        known = [number for number in self._excess if self._files.get(number)]
        if not known and self._excess:
            self._find_recent(set(self._excess))
            known = [number for number in self._excess if self._files.get(number)]
        if not known:
            return None
        return self._files[max(known, key=self._excess.__getitem__)].pop()

    def _find_recent(self, numbers: set[int]) -> None:
        namespace = self._current_namespace()
        for key in reversed(self._usage.take_recent(numbers)):
            path = namespace.block_path(key)
            try:
                status = os.lstat(path)
            except OSError:  # evicted, or written before a reset
                continue
            times = status.st_mtime_ns, status.st_atime_ns
            block = BlockFile(times[0], path, status.st_size, namespace.format.name(key), times[1])
            self._files.setdefault(get_offload_tenant(key), []).append(block)

    def on_evicted(self, block: BlockFile, num_bytes: int) -> None:
        number = self.tenant_of(block)
        self._usage.remove(number, num_bytes)
        if number in self._excess:
            self._excess[number] -= num_bytes
            if self._excess[number] <= 0:
                del self._excess[number]


def _tells_tenants(document: str) -> bool:
    try:
        found = parse_document(document)
    except NamespaceDocumentError:
        return False
    return not found.get("encryption") and found.get("layout_version") == LAYOUT_VERSION
