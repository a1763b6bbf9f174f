"""A store that answers what a test tells it to, in place of the library's client."""

from collections.abc import Callable, Sequence

from kvtier.tiering.mooncake.native import ReplicaOptions


class ScriptedStore:
    """Answers each name of a call with the same number.

    Args:
        answer: the number.
        during: called in the middle of each call.
    """

    def __init__(self, answer: int = 0, during: Callable[[], None] = lambda: None) -> None:
        self.answer = answer
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

    def batch_is_exist(self, names: list[str], /) -> list[int]:
        """Look nothing up."""
        return self._answer("exist", names)

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
        self.during()
        return [self.answer] * len(names)
