"""The registry: lazy, without silent overwriting, helpful with misspelt names, open to classes of one's own."""

import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from tests.own_classes import write_offers, write_package

from kvtier.cpu.policies.base import CachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import DuplicateNameError, NamedClassError, UnknownNameError
from kvtier.registry import Registry


def test_a_name_resolves_to_its_target() -> None:
    registry: Registry[type] = Registry("thing", {"ordered": "collections:OrderedDict"})
    assert registry.resolve("ordered") is OrderedDict


def test_nothing_is_imported_before_it_is_resolved() -> None:
    sys.modules.pop("this", None)
    registry: Registry[type] = Registry("thing", {"lazy": "kvtier.does_not_exist:Thing"})
    assert "lazy" in registry
    with pytest.raises(ModuleNotFoundError):
        registry.resolve("lazy")


def test_a_registered_name_is_known() -> None:
    registry: Registry[type] = Registry("thing")
    registry.register("ordered", "collections:OrderedDict")
    assert registry.names() == ["ordered"]
    assert "ordered" in registry
    assert "other" not in registry


def test_a_second_registration_is_refused_and_changes_nothing() -> None:
    registry: Registry[type] = Registry("thing", {"ordered": "collections:OrderedDict"})
    with pytest.raises(DuplicateNameError, match="thing 'ordered' is already registered"):
        registry.register("ordered", "collections:Counter")
    assert registry.resolve("ordered") is OrderedDict


def test_an_unknown_name_is_met_with_the_nearest_and_all_known() -> None:
    registry: Registry[type] = Registry("thing", {"zebra": "a:b", "ordered": "a:b"})
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("orderd")
    assert (caught.value.nearest, caught.value.known) == ("ordered", ("ordered", "zebra"))


def test_registries_do_not_share_their_names() -> None:
    targets = {"ordered": "collections:OrderedDict"}
    first: Registry[type] = Registry("thing", targets)
    second: Registry[type] = Registry("thing", targets)
    first.register("counter", "collections:Counter")
    assert second.names() == ["ordered"]
    assert repr(first) == "Registry(thing: counter, ordered)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules are imported, like one of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def policies() -> Registry[type[CachePolicy]]:
    """Return a table with kvtier's names for two policies, to which packages may add."""
    targets = {
        "lru": "kvtier.cpu.policies.lru:LRUCachePolicy",
        "arc": "kvtier.cpu.policies.arc:ARCCachePolicy",
    }
    return Registry("eviction policy", targets, contract=CachePolicy, entry_points="kvtier.policies")


def test_a_class_that_nobody_registered_is_found_by_its_module(folder: Path) -> None:
    write_package(folder, "named_package")

    found = policies().resolve("named_package.parts:Mine")

    assert (found.__module__, found.__name__) == ("named_package.parts", "Mine")
    assert issubclass(found, LRUCachePolicy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.parts:Mine", "there is no module 'no_such_package': install its package, or put its"),
        ("bad_package.nowhere:Mine", "there is no module 'bad_package.nowhere': install its package"),
        ("bad_package.needy:Mine", "no module 'a_library_that_nobody_has': 'bad_package.needy' imports it"),
        ("bad_package.broken:Mine", "importing 'bad_package.broken' raised ZeroDivisionError"),
        ("bad_package.parts:Mien", "module 'bad_package.parts' has no 'Mien': correct the name of the class"),
        ("bad_package.parts:NUMBER", "is 7: it must be a subclass of kvtier.cpu.policies.base.CachePolicy"),
        ("bad_package.parts:FolderTier", "it must be a subclass of kvtier.cpu.policies.base.CachePolicy"),
        ("bad_package.parts:Unfinished", "lacks methods of .*: write evict, get, insert, remove, touch"),
        ("bad_package.parts:", "is no class: write \"package.module:Class\""),
        (":Mine", "is no class: write \"package.module:Class\""),
        ("bad_package/parts.py:Mine", "is no class: write \"package.module:Class\""),
        ("..parts:Mine", "is no class: write \"package.module:Class\""),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_used_is_named_with_what_to_do(folder: Path, name: str, message: str) -> None:
    write_package(folder, "bad_package")

    with pytest.raises(NamedClassError, match=message) as caught:
        policies().resolve(name)

    assert (caught.value.kind, caught.value.name) == ("eviction policy", name)
    assert str(caught.value).startswith(f"eviction policy {name!r}: ")


def test_an_unknown_name_says_that_a_class_may_be_named_and_how() -> None:
    with pytest.raises(
        UnknownNameError, match=r"did you mean 'lru'.*; a class .* named \"package.module:Class\""
    ):
        policies().resolve("LRUU")
    with pytest.raises(UnknownNameError, match=r"did you mean 'my_package.my_module:Mine'"):
        policies().resolve("my_package.my_module.Mine")


def test_what_people_write_for_a_name_is_answered_with_the_names_it_may_mean() -> None:
    meant = {"nvme": ("slab", "fs")}
    registry: Registry[type] = Registry("place", {"fs": "a:B", "slab": "a:C"}, contract=object, meant=meant)

    with pytest.raises(UnknownNameError, match="did you mean 'slab' or 'fs'") as caught:
        registry.resolve("NVMe")

    assert caught.value.nearest == "slab"


def test_without_a_contract_no_class_is_imported_by_its_module() -> None:
    registry: Registry[type] = Registry("thing", {"ordered": "collections:OrderedDict"})

    with pytest.raises(UnknownNameError, match=r"known are ordered$"):
        registry.resolve("collections:Counter")


def test_an_installed_package_offers_a_class_under_a_name_and_is_imported_when_it_is_resolved(
    folder: Path,
) -> None:
    write_package(folder, "offering_package")
    write_offers(folder, "offering", {"kvtier.policies": {"mine": "offering_package.parts:Mine [extra]"}})
    registry = policies()

    assert registry.names() == ["arc", "lru", "mine"]
    assert "mine" in registry
    assert "offering_package.parts" not in sys.modules
    assert registry.resolve("mine").__name__ == "Mine"
    assert "offering_package.parts" in sys.modules


def test_an_offer_that_is_no_policy_is_refused_by_its_name(folder: Path) -> None:
    write_package(folder, "wrong_package")
    write_offers(folder, "wrong", {"kvtier.policies": {"mine": "wrong_package.parts:FolderTier"}})

    with pytest.raises(NamedClassError, match=r"'mine': is .*FolderTier.*: it must be a subclass of"):
        policies().resolve("mine")


def test_kvtier_s_own_name_wins_over_an_offer_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_package(folder, "clashing_package")
    write_offers(folder, "clashing", {"kvtier.policies": {"lru": "clashing_package.parts:Mine"}})
    registry = policies()

    assert registry.resolve("lru") is registry.resolve("lru") is LRUCachePolicy

    (warning,) = caplog.messages
    assert "'lru' is kvtier's own: what package clashing offers under the name is not used" in warning


def test_a_name_that_two_packages_offer_for_different_classes_is_refused(folder: Path) -> None:
    write_package(folder, "double_package")
    write_offers(folder, "first", {"kvtier.policies": {"mine": "double_package.parts:Mine"}})
    write_offers(folder, "second", {"kvtier.policies": {"mine": "double_package.parts:NeedsMore"}})

    message = (
        r"packages first \(double_package.parts:Mine\) and second \(.*\) offer it: uninstall all but one"
    )
    with pytest.raises(NamedClassError, match=message):
        policies().resolve("mine")


def test_damaged_metadata_of_a_package_leaves_the_built_in_names(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_offers(folder, "damaged", {"kvtier.policies": {"mine": "somewhere:Mine"}})
    (folder / "damaged-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[kvtier.policies]\n")

    assert policies().resolve("lru") is LRUCachePolicy
    assert "entry points 'kvtier.policies' cannot be read" in caplog.text
