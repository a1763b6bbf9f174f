"""The other namespaces of a tier's place: whether one of them holds a block that this engine misses.

Content hashes name tokens, not bytes. So an engine whose dtype, RoPE or weights changed asks for keys that another
namespace holds, finds none, and nothing seems wrong. The lookup's thread, which has just found that a block is not
there, looks into a few siblings for it; the scheduler's thread reads what it has found.

The look is bounded: a few blocks, a few siblings, one listing in a minute. Where it costs round trips, one that finds
nothing is followed by a pause, which doubles as long as nothing is found.

After an upgrade the siblings are of an older layout, which this version does not read. The first listing says how much
they take and which command removes them.
"""

import logging
import shlex
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvtier.base import OffloadKey
from kvtier.errors import NamespaceDocumentError, TierError
from kvtier.misses import MORE_FIELDS, Miss, MissCause
from kvtier.namespace import LAYOUT_VERSION, Namespace, differences, is_older_layout, parse_document

logger = logging.getLogger(__name__)

MAX_SIBLINGS = 8
"""Namespaces that are looked into. Each costs a system call, or a part of a request, for each block looked for."""

MAX_LOOKED_FOR = 4
"""Missing blocks of a lookup that are looked for in every sibling: the first ones, where a prefix ends. When one of
them is found, all blocks of that lookup are looked for there, so that requests behind it have a cause too."""

MAX_FOUND = 4096
"""Blocks remembered that a sibling holds, about 200 bytes each; the oldest is forgotten first."""

MAX_RANK = 2**31
"""Of a sibling that shares no block with this namespace: more than fields can differ."""

MAX_FIELDS = 4
"""Fields that a cause names; a namespace that differs in more is of another model."""

LISTING_S = 60.0
"""Seconds for which the list of siblings is used. Shorter lists a distant place more often; longer notices later that
an engine with other settings has begun to write."""

KEY_FIELDS = frozenset({"hash_block_size", "hash_algorithm", "hash_seed"})
"""Fields that decide the keys: where one differs, the same tokens have other keys, and no block of the sibling is ever
found."""

OTHER_LAYOUT = "layout_version"
"""The one field that a cause names where a sibling's layout is another."""

UNKNOWN_AMOUNT = "an unknown amount"
"""What is said of blocks that a place cannot count cheaply."""

MAX_PAUSE_S = 60.0
"""The longest pause after looks that found nothing: later, and the first minutes after an operator's mistake would have
no cause; sooner, and a healthy engine would pay a round trip more often for nothing."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another namespace of the place.

    Attributes:
        name: its name.
        miss: the cause of blocks that it holds: which fields of its identity differ.
        has_other_layout: whether it is of another version of kvtier, which reads and writes other blocks.
        has_other_keys: whether it is of the same model and tenant, and names the same tokens with other keys.
    """

    name: str
    miss: Miss
    has_other_layout: bool = False
    has_other_keys: bool = False


class SiblingPlace(ABC):
    """What a tier's place must be able to tell of other namespaces. Called on the lookup's thread, and may block.

    Attributes:
        fate: what becomes of blocks that no engine uses, in words, as the end of "they are not readable and".
    """

    fate = "are evicted as room is needed"

    @abstractmethod
    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        """Return names and documents of namespaces but the own one, the likeliest first.

        Raises:
            TierError: the place cannot be reached.
            OSError: the same, of a place that is a directory.
        """

    @abstractmethod
    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        """Return the first of the namespaces that holds one of ``keys``; None when none does. Raises as above."""

    @abstractmethod
    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return which of ``keys`` a namespace holds. Raises as above."""

    def note_siblings(self, siblings: Sequence[Sibling]) -> None:
        """Do what is to be done, such as a line in the log, when siblings have been listed for the first time.

        Args:
            siblings: those of this version's layout.
        """

    def measure_older(self, documents: Sequence[tuple[str, str]]) -> str:
        """Return in words how many bytes namespaces of older layouts take, at a bounded cost.

        Args:
            documents: their names and documents.
        """
        del documents
        return UNKNOWN_AMOUNT


class SiblingNamespaces:
    """Looks for missing blocks in the other namespaces of a place.

    Mutable are the list of siblings and the pause, which the lookup's thread alone uses, and the blocks found, which
    it writes and the scheduler's thread reads; single operations of a dictionary are atomic.

    Args:
        tier: type of the tier.
        place: where its namespaces are.
        clock: seconds, monotonic.
        pause_s: the first pause after a look that found nothing, in seconds; 0: there is none, for a place where a
            look costs microseconds.
        where: the place, as commands take it.

    Attributes:
        found: blocks that this namespace misses and a sibling holds, with the cause; mostly empty.
    """

    def __init__(
        self,
        tier: str,
        place: SiblingPlace,
        clock: Callable[[], float],
        pause_s: float = 0.0,
        *,
        where: str = "PLACE",
    ) -> None:
        self._where = where
        self._has_noted_older = False
        self._tier = tier
        self._place = place
        self._clock = clock
        self._first_pause_s = self._pause_s = pause_s
        self._next_look_s = clock()
        self._listed_s: float | None = None
        self._listed_for = ""
        self._siblings: list[Sibling] = []
        self._suspected: Miss | None = None
        self.found: OrderedDict[OffloadKey, Miss] = OrderedDict()

    def look_for(self, own: Namespace, missing: Sequence[OffloadKey]) -> None:
        """Look for blocks that the namespace ``own`` lacks. Thread: the lookup's; blocks for some calls."""
        if not missing or self._clock() < self._next_look_s:
            return
        try:
            self._list(own)
            is_found = bool(self._siblings) and self._look_into(missing)
        except (TierError, OSError):
            is_found = False  # the cause of a miss is not worth a failed lookup
        if is_found:
            self._pause_s = self._first_pause_s
        elif self._pause_s:
            self._next_look_s = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def explain(self, key: OffloadKey) -> Miss | None:
        """Return in what the namespace differs that holds ``key``, or that would have it under another key."""
        return self.found.get(key) or self._suspected

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks that this namespace holds by now. Thread: any."""
        for key in keys:
            self.found.pop(key, None)

    def _look_into(self, missing: Sequence[OffloadKey]) -> bool:
        by_name = {sibling.name: sibling for sibling in self._siblings}
        holder = self._place.held_by(list(by_name), missing[:MAX_LOOKED_FOR])
        if holder is None:
            return False
        for key in self._place.held_in(holder, missing):
            self.found[key] = by_name[holder].miss
        while len(self.found) > MAX_FOUND:
            self.found.popitem(last=False)
        return True

    def _list(self, own: Namespace) -> None:
        is_first = self._listed_for != own.name
        now_s = self._clock()
        if not is_first and self._listed_s is not None and now_s - self._listed_s < LISTING_S:
            return
        self._listed_s, self._listed_for = now_s, own.name
        documents = self._place.read_documents(own.name, MAX_SIBLINGS)
        self._siblings = describe_siblings(self._tier, own, documents)
        other_keys = [sibling.miss for sibling in self._siblings if sibling.has_other_keys]
        self._suspected = other_keys[0]._replace(cause=MissCause.NEVER_SEEN) if other_keys else None
        current = [sibling for sibling in self._siblings if not sibling.has_other_layout]
        if is_first and current:
            self._place.note_siblings(current)
        older = [] if self._has_noted_older else list_older(documents)
        if older:
            self._has_noted_older = True
            amount = self._place.measure_older(older)
            log_older_layouts(self._tier, amount, len(older), self._place.fate, self._where)


def describe_siblings(tier: str, own: Namespace, documents: Sequence[tuple[str, str]]) -> list[Sibling]:
    """Return the namespaces whose documents can be read, each with what distinguishes it, the nearest first. Pure.

    A mistake changes a field or two, another model changes many, another layout everything.

    Args:
        tier: type of the tier.
        own: the namespace that lacks blocks.
        documents: names and documents of others.
    """
    siblings: list[tuple[int, Sibling]] = []
    for name, document in documents:
        try:
            found = differences(document, own.document)
        except (ValueError, RecursionError, NamespaceDocumentError):  # what others have written is input
            continue
        detail = {"namespace": name[:8]}
        for one in found[:MAX_FIELDS]:
            detail[one.field] = f"{one.value_a} (here {one.value_b})"
        has_other_layout = OTHER_LAYOUT in detail
        if has_other_layout:
            age = "older" if is_older_layout(parse_document(document)) else "newer"
            detail[OTHER_LAYOUT] = f"{found[0].value_a}, {age} and not readable (here {found[0].value_b})"
        if len(found) > MAX_FIELDS:
            detail[MORE_FIELDS] = f"{len(found) - MAX_FIELDS} fields more"
        miss = Miss(MissCause.OTHER_NAMESPACE, tier, MappingProxyType(detail))
        rank = MAX_RANK if has_other_layout else len(found)
        fields = {one.field for one in found}
        is_stranger = any(one.startswith("model.") or one == "tenant" for one in fields)
        siblings.append(
            (rank, Sibling(name, miss, has_other_layout, bool(fields & KEY_FIELDS) and not is_stranger))
        )
    return [sibling for _, sibling in sorted(siblings, key=lambda each: each[0])[:MAX_SIBLINGS]]


def list_older(documents: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the namespaces of older layouts, with their documents. Pure."""
    older = []
    for name, document in documents:
        try:
            if is_older_layout(parse_document(document)):
                older.append((name, document))
        except NamespaceDocumentError:  # what others have written is input
            continue
    return older


def row_bytes_of(document: str) -> int | None:
    """Return the bytes of one block that a namespace's document names; None where it names none. Pure."""
    num_bytes = parse_document(document).get("row_stride_bytes")
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool):
        return None
    return num_bytes if 0 < num_bytes < 2**50 else None


def amount_in_words(num_bytes: float) -> str:
    """Return a number of bytes as ``kvtier inspect`` shows it: "1.5 GiB". Pure."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def log_older_layouts(tier: str, amount: str, num_namespaces: int, fate: str, where: str) -> None:
    """Log what an upgrade finds: blocks that this version cannot read, and what removes them.

    Args:
        tier: type of the tier.
        amount: how much they take, in words.
        num_namespaces: how many namespaces they are of.
        fate: what becomes of them, in words.
        where: the place, as commands take it.
    """
    logger.warning(
        "tier %s: %s of an older layout (here %d), %d namespace%s: its blocks are not readable and %s; to remove them "
        "now: kvtier purge %s --older-layouts",
        tier,
        amount,
        LAYOUT_VERSION,
        num_namespaces,
        "" if num_namespaces == 1 else "s",
        fate,
        shlex.quote(where),
    )


def log_siblings(tier: str, own_name: str, sibling: Sibling, num_blocks: str) -> None:
    """Log once that this namespace is empty where a sibling is not.

    Args:
        tier: type of the tier.
        own_name: the empty one.
        sibling: the other.
        num_blocks: how many blocks that holds, in words.
    """
    fields = [f"{name} {value}" for name, value in sibling.miss.detail.items() if name != "namespace"]
    logger.info(
        "tier %s: namespace %s holds nothing here; %s has %s blocks and differs in %s",
        tier,
        own_name[:8],
        sibling.miss.detail["namespace"],
        num_blocks,
        ", ".join(fields) or "nothing that is written down",
    )
