"""One lazy table from names to classes, used by specs, tiers, policies and codecs.

It imports nothing until a name is resolved: a built-in tier whose client library is missing costs
nothing to those who do not use it.
"""

import importlib
from typing import Generic, TypeVar

from kvtier.errors import DuplicateNameError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind, each pointing at ``module:attribute``.

    Args:
        kind: what the names stand for; it appears in messages.
        targets: the built-in names.
    """

    def __init__(self, kind: str, targets: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._targets: dict[str, str] = dict(targets or {})

    def register(self, name: str, target: str) -> None:
        """Add ``name``, to be imported from ``target`` when first resolved.

        Args:
            name: what a configuration will say.
            target: ``"package.module:attribute"``.

        Raises:
            DuplicateNameError: the name is taken.
        """
        if name in self._targets:
            raise DuplicateNameError(self.kind, name)
        self._targets[name] = target

    def resolve(self, name: str) -> T:
        """Import and return what ``name`` stands for.

        Raises:
            UnknownNameError: nobody registered the name.
            MissingExtraError: its client library is not installed.
        """
        if name not in self._targets:
            raise UnknownNameError(self.kind, name, self._targets)
        module, _, attribute = self._targets[name].partition(":")
        found: T = getattr(importlib.import_module(module), attribute)
        return found

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self.names())})"
