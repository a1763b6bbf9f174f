"""The registry: lazy, without silent overwriting, helpful with misspelt names."""

import sys
from collections import OrderedDict

import pytest

from kvtier.errors import DuplicateNameError, UnknownNameError
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
