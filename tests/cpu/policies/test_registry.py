"""Policies are found by name; a misspelt name is met with the nearest one, a removed one with what to write."""

from pathlib import Path

import pytest
from tests.own_classes import write_offers, write_package

from kvtier.cli.simulate.options import require_policy
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES, CachePolicy, create_cache_policy
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.registry import REMOVED_POLICIES
from kvtier.errors import NamedClassError, UnknownNameError
from kvtier.registry import Registry


def test_built_in_policies_are_built_with_their_capacity() -> None:
    assert {"lru", "arc", "hazard"} <= set(CACHE_POLICIES.names())
    assert isinstance(create_cache_policy("lru", 3), LRUCachePolicy)
    policy = create_cache_policy("arc", 3)
    assert isinstance(policy, ARCCachePolicy)
    assert policy.cache_capacity == 3


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown eviction policy 'lur': did you mean 'lru'"):
        create_cache_policy("lur", 3)


@pytest.mark.parametrize("name", REMOVED_POLICIES)
def test_a_removed_policy_is_refused_with_what_to_write_instead(name: str) -> None:
    expected = f'{name!r}: no longer comes with kvtier: write "lru" or "hazard", or name a class of your own'
    with pytest.raises(NamedClassError, match=f"^eviction policy {expected}"):
        CPUOffloadingManager(3, name)
    with pytest.raises(NamedClassError, match=f"^eviction policy for --policy {expected}"):
        require_policy("--policy", name)


def test_a_policy_of_one_s_own_may_have_the_name_of_a_removed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "fifo_package")
    write_offers(tmp_path, "fifo", {"kvtier.policies": {"fifo": "fifo_package.parts:Mine"}})
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type[CachePolicy]] = Registry(
        "eviction policy",
        contract=CachePolicy,
        entry_points="kvtier.policies",
        removed=REMOVED_POLICIES,
    )

    assert registry.resolve("fifo").__name__ == "Mine"


def test_a_policy_of_one_s_own_is_built_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "own_policy_package")
    monkeypatch.syspath_prepend(tmp_path)

    assert create_cache_policy("own_policy_package.parts:Mine", 3).cache_capacity == 3
    with pytest.raises(
        NamedClassError, match=r"NeedsMore': building it for 3 blocks raised TypeError: .*'more'"
    ):
        create_cache_policy("own_policy_package.parts:NeedsMore", 3)
