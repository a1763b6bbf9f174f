"""A store that answers what a test tells it to, in place of the library's client."""

from collections.abc import Callable, Sequence

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import make_rows
from kvtier.tiering.kit.backend import Counters, rows_of
from kvtier.tiering.kit.blobs import BlobStore
from kvtier.tiering.kit.blobs.place import BlobSiblings
from kvtier.tiering.kit.blobs.store import COUNTS
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.mooncake.blobs import MooncakeBlobs
from kvtier.tiering.mooncake.native import NativeStore, ReplicaOptions
from kvtier.tiering.mooncake.settings import MooncakeSettings


class ScriptedStore:
    """Answers each name of a call with the same number.

    Args:
        answer: the number.
        during: called in the middle of each call.

    Attributes:
        there: what it answers to whether a value is there; None: the same number.
        asked: the names of all calls.
    """

    def __init__(self, answer: int = 0, during: Callable[[], None] = lambda: None) -> None:
        self.answer = answer
        self.there: int | None = None
        self.asked: list[str] = []
        self.size = -704
        self.during = during
        self.calls: list[str] = []
        self.registered_bytes: list[int] = []

    def setup(self, *_: object) -> int:
        """Join."""
        return 0

    def register_buffer(self, address: int, num_bytes: int, /) -> int:
        """Take note of memory."""
        self.registered_bytes.append(num_bytes)
        return 0

    def unregister_buffer(self, address: int, /) -> int:
        """Take note that memory is given back."""
        return 0

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: object, lengths: object, config: ReplicaOptions, /
    ) -> list[int]:
        """Write nothing."""
        return self._answer("put", names)

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: object, lengths: object, /
    ) -> list[int]:
        """Read nothing."""
        return self._answer("get", names)

    def get_into_ranges(self, addresses: object, names: list[list[str]], *_: object) -> list[list[list[int]]]:
        """Read no part."""
        return [[self._answer("get part", names[0])]]

    def batch_is_exist(self, names: list[str], /) -> list[int]:
        """Look nothing up."""
        answers = self._answer("exist", names)
        return answers if self.there is None else [self.there] * len(names)

    def batch_remove(self, names: list[str], /) -> list[int]:
        """Remove nothing."""
        return self._answer("remove", names)

    def remove_by_regex(self, pattern: str, /) -> int:
        """Remove nothing."""
        self.calls.append(f"remove {pattern}")
        return self.answer

    def get_size(self, name: str, /) -> int:
        """Return the scripted size."""
        self.calls.append("size")
        return self.size

    def close(self) -> int:
        """Leave."""
        self.calls.append("close")
        return 0

    def _answer(self, call: str, names: Sequence[str]) -> list[int]:
        self.calls.append(call)
        self.asked += names
        self.during()
        return [self.answer] * len(names)


def make_settings(master: str = "127.0.0.1:1") -> MooncakeSettings:
    """Return settings of a tier with one thread."""
    return MooncakeSettings(master=master, timeout_s=1.0, num_threads=1, allow_any_interface=True)


def open_store(native: NativeStore, clock: ManualClock) -> BlobStore:
    """Return what a tier's threads call, over a store that a test has made."""
    rows = rows_of(make_rows())
    blobs = MooncakeBlobs(make_settings(), rows, clock, lambda _: native)
    place = BlobSiblings("mooncake", blobs, has_capacity=False)
    siblings = SiblingNamespaces("mooncake", place, clock)
    return BlobStore("mooncake", blobs, rows, siblings, None, Counters(*COUNTS), clock=clock)
