"""A lazy table from names to classes, used by specs, tiers, policies and codecs.

A class is imported when its name is resolved, so a built-in tier with a missing client library costs nothing to users
of other tiers. Where a table has a contract, a configuration may also name a class that is not registered:
``package.module:Class``, or the name of an entry point of an installed package. Registered names come first, so no
package can change the meaning of ``lru`` or ``fs``.

Resolving such a name imports, and so runs, its module. Names come from the operator's own settings and command line,
never from data of a tier, a peer or a trace.
"""

import importlib
import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

from kvtier.errors import DuplicateNameError, KVTierError, NamedClassError, UnknownNameError

T = TypeVar("T")

CLASS_FORM = '"package.module:Class"'
"""The form in which a configuration names a class that is not registered."""

logger = logging.getLogger(__name__)


class Registry(Generic[T]):
    """Names of one kind, each pointing at ``module:attribute``.

    Args:
        kind: what the names stand for; it appears in messages.
        targets: the built-in names.
        contract: the required base class; None: only registered names are allowed.
        entry_points: group of entry points with which installed packages offer classes; None: none.
        meant: common misnomers -> the names that they may mean.
        removed: names that no longer come with kvtier -> what to write instead. A package may take such a name.
    """

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str] | None = None,
        *,
        contract: type | None = None,
        entry_points: str | None = None,
        meant: Mapping[str, tuple[str, ...]] | None = None,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self._targets: dict[str, str] = dict(targets or {})
        self._built_in = frozenset(self._targets)
        self._contract = contract
        self._group = entry_points
        self._meant = dict(meant or {})
        self._removed = dict(removed or {})
        self._offers: dict[str, dict[str, str]] | None = None

    def register(self, name: str, target: str) -> None:
        """Add ``name``, to be imported from ``target`` when first resolved.

        Args:
            name: the name in configurations.
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
            UnknownNameError: it is neither registered nor offered, and does not name a class.
            NamedClassError: the class that it names cannot be imported, does not fulfil the contract, or no longer
                comes with kvtier.
            MissingExtraError: its client library is not installed.
        """
        offers = self._find_offers()
        if name in self._built_in:
            module, _, attribute = self._targets[name].partition(":")
            built_in: T = getattr(importlib.import_module(module), attribute)
            return built_in
        if name in self._targets:
            return self._load(name, self._targets[name])
        if self._contract is not None and ":" in name:
            return self._load(name, name)
        if name in offers:
            return self._load(name, self._only_offer(name, offers[name]))
        if name in self._removed:
            raise NamedClassError(self.kind, name, self._removed[name])
        raise self._unknown(name)

    def names(self) -> list[str]:
        """Return every known name, sorted: registered ones and those that installed packages offer."""
        return sorted({*self._targets, *self._find_offers()})

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self._find_offers()

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self.names())})"

    def _find_offers(self) -> Mapping[str, Mapping[str, str]]:
        """Return the entry points to use, read once: name -> target -> package.

        They are compared with built-in names when the first name is resolved, to warn the user of a package that offers
        its own ``lru``: kvtier's is used.
        """
        if self._offers is None:
            self._offers = {} if self._group is None else read_entry_points(self._group)
            for name in sorted(self._offers.keys() & self._targets.keys()):
                logger.warning(
                    "%s %r is kvtier's own: what package %s offers under the name is not used, name it as a class, %s",
                    self.kind,
                    name,
                    ", ".join(sorted(self._offers[name].values())),
                    CLASS_FORM,
                )
        return self._offers

    def _only_offer(self, name: str, offers: Mapping[str, str]) -> str:
        if len(offers) > 1:
            several = " and ".join(f"{package} ({target})" for target, package in sorted(offers.items()))
            reason = f"packages {several} offer it: uninstall all but one, or name the class itself"
            raise NamedClassError(self.kind, name, reason)
        return next(iter(offers))

    def _unknown(self, name: str) -> UnknownNameError:
        if self._contract is None:
            return UnknownNameError(self.kind, name, self.names())
        module, dot, attribute = name.rpartition(".")
        meant = self._meant.get(name.lower(), (f"{module}:{attribute}",) if dot else ())
        also = f"a class of your own is named {CLASS_FORM}"
        return UnknownNameError(self.kind, name, self.names(), meant=meant, also=also)

    def _load(self, name: str, target: str) -> T:
        """Import a class that is not kvtier's own, and check it."""
        module_name, _, path = target.partition(":")
        if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
            raise NamedClassError(self.kind, name, f"{target!r} is no class: write {CLASS_FORM}")
        found: Any = self._import(name, module_name)  # Any: checked below
        for part in path.split("."):
            if not hasattr(found, part):
                reason = f"module {module_name!r} has no {path!r}: correct the name of the class"
                raise NamedClassError(self.kind, name, reason)
            found = getattr(found, part)
        self._check(name, found)
        loaded: T = found
        return loaded

    def _import(self, name: str, module_name: str) -> ModuleType:
        try:
            return importlib.import_module(module_name)
        except KVTierError:
            raise  # the message of a missing extra names what to install
        except ModuleNotFoundError as error:
            missing = error.name or str(error)
            remedy = "install its package, or put its folder into PYTHONPATH"
            if not f"{module_name}.".startswith(f"{missing}."):
                remedy = f"{module_name!r} imports it: install it"
            raise NamedClassError(self.kind, name, f"there is no module {missing!r}: {remedy}") from error
        except Exception as error:  # foreign module: its import may raise anything
            reason = f"importing {module_name!r} raised {type(error).__name__}: {error}: correct the module"
            raise NamedClassError(self.kind, name, reason) from error

    def _check(self, name: str, found: object) -> None:
        contract = self._contract
        if contract is None:
            return
        base = f"{contract.__module__}.{contract.__qualname__}"
        if not isinstance(found, type) or not issubclass(found, contract):
            raise NamedClassError(self.kind, name, f"is {found!r}: it must be a subclass of {base}")
        unwritten: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
        if unwritten:
            missing = ", ".join(sorted(unwritten))
            raise NamedClassError(self.kind, name, f"lacks methods of {base}: write {missing}")


def read_entry_points(group: str) -> dict[str, dict[str, str]]:
    """Return the offers of installed packages in ``group``: name -> target ``module:attribute`` -> package."""
    # Importing importlib.metadata takes longer than all of kvtier, and a table without a group does not need it.
    from importlib.metadata import entry_points

    offers: dict[str, dict[str, str]] = {}
    try:
        for point in entry_points(group=group):
            package = point.dist.name if point.dist is not None else "?"
            offers.setdefault(point.name, {})[point.value.partition("[")[0].strip()] = package or "?"
    except Exception as error:  # noqa: BLE001 - foreign metadata: a damaged package must not break built-in names
        logger.warning("entry points %r cannot be read, those of no package are used: %s", group, error)
        return {}
    return offers
