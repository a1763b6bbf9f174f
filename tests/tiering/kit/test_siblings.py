"""Where a look costs round trips it is bounded: a few blocks, a few siblings, and pauses after looks in vain."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import LAYOUT_VERSION, Namespace, make_namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import key_of, make_config
from kvtier.tiering.kit.siblings import (
    LISTING_S,
    MAX_FOUND,
    MAX_LOOKED_FOR,
    MAX_PAUSE_S,
    MAX_SIBLINGS,
    SiblingNamespaces,
    SiblingPlace,
    describe_siblings,
)

CONFIG = make_config()


def identity_of(**fields: str) -> Namespace:
    return make_namespace(replace(CONFIG, model=replace(CONFIG.model, **fields)), 8192)


OWN, OTHER = identity_of(dtype="bfloat16"), identity_of(dtype="float16")


class ScriptedPlace(SiblingPlace):
    """A place with one sibling, which counts what it is asked."""

    def __init__(self, held: Collection[OffloadKey] = ()) -> None:
        self.held = held
        self.is_away = False
        self.num_listings = 0
        self.asked: list[Sequence[OffloadKey]] = []

    def read_documents(self, own_name: str, max_namespaces: int) -> Sequence[tuple[str, str]]:
        self.num_listings += 1
        if self.is_away:
            raise TierError("scripted", "away")
        return [(OTHER.name, OTHER.document)]

    def held_by(self, names: Sequence[str], keys: Sequence[OffloadKey]) -> str | None:
        self.asked.append(keys)
        return names[0] if any(key in self.held for key in keys) else None

    def held_in(self, name: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        return [key for key in keys if key in self.held]


def keys(num: int, first: int = 0) -> list[OffloadKey]:
    return [key_of(number) for number in range(first, first + num)]


def test_looks_in_vain_become_rare_and_one_that_finds_something_does_not() -> None:
    place, clock = ScriptedPlace(), ManualClock()
    siblings = SiblingNamespaces("obj", place, clock, pause_s=1.0)
    for _ in range(600):
        siblings.look_for(OWN, keys(3))
        clock.advance(1.0)
    assert len(place.asked) <= 6 + 600 / MAX_PAUSE_S

    place.held = keys(100)
    clock.advance(MAX_PAUSE_S)
    for first in range(10):
        siblings.look_for(OWN, keys(3, first=first))
    assert siblings.explain(key_of(11)) is not None, "a pause although every look finds something"


def test_a_place_without_pauses_is_looked_into_each_time() -> None:
    place = ScriptedPlace()
    siblings = SiblingNamespaces("fs", place, ManualClock())
    for _ in range(10):
        siblings.look_for(OWN, keys(3))

    assert (len(place.asked), place.num_listings) == (10, 1)


def test_only_the_first_blocks_are_looked_for_everywhere() -> None:
    place = ScriptedPlace(held=keys(1, first=MAX_LOOKED_FOR))
    siblings = SiblingNamespaces("obj", place, ManualClock())
    siblings.look_for(OWN, keys(20))

    assert place.asked == [keys(MAX_LOOKED_FOR)]
    assert not siblings.found


def test_a_place_that_is_away_costs_a_pause_and_no_error() -> None:
    place, clock = ScriptedPlace(held=keys(3)), ManualClock()
    siblings = SiblingNamespaces("obj", place, clock, pause_s=1.0)
    place.is_away = True
    siblings.look_for(OWN, keys(3))
    place.is_away = False
    siblings.look_for(OWN, keys(3))
    assert not place.asked
    clock.advance(LISTING_S)
    siblings.look_for(OWN, keys(3))

    assert siblings.explain(key_of(0)) is not None


def test_what_is_found_is_bounded() -> None:
    siblings = SiblingNamespaces("obj", ScriptedPlace(held=keys(2 * MAX_FOUND)), ManualClock())
    siblings.look_for(OWN, keys(2 * MAX_FOUND))

    assert len(siblings.found) == MAX_FOUND


def test_of_many_namespaces_those_that_differ_least_are_looked_into() -> None:
    far = [identity_of(dtype="x", revision=f"r{n}", config_digest=f"c{n}") for n in range(MAX_SIBLINGS + 5)]
    documents = [(one.name, one.document) for one in (*far, OTHER)]
    found = describe_siblings("obj", OWN, documents)

    assert len(found) == MAX_SIBLINGS
    assert found[0].name == OTHER.name
    assert found[0].miss.detail["model.dtype"] == "float16 (here bfloat16)"


def test_siblings_of_an_older_layout_come_behind_those_that_can_be_read() -> None:
    older = json.dumps(json.loads(OWN.document) | {"layout_version": LAYOUT_VERSION - 1})
    near = identity_of(dtype="x", revision="r")
    documents = [(f"{number:032x}", older) for number in range(MAX_SIBLINGS + 2)]
    found = describe_siblings("obj", OWN, [*documents, (near.name, near.document)])

    assert [one.has_other_layout for one in found] == [False] + [True] * (MAX_SIBLINGS - 1)
    assert found[0].name == near.name
