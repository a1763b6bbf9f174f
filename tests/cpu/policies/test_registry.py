"""Policies are found by name, and a misspelt name is met with the nearest one."""

from pathlib import Path

import pytest
from tests.own_classes import write_package

from kvtier.cpu.policies import CACHE_POLICIES, create_cache_policy
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import NamedClassError, UnknownNameError


def test_built_in_policies_are_built_with_their_capacity() -> None:
    assert {"fifo", "lru", "arc", "s3fifo", "sieve", "mq"} <= set(CACHE_POLICIES.names())
    assert isinstance(create_cache_policy("lru", 3), LRUCachePolicy)
    policy = create_cache_policy("arc", 3)
    assert isinstance(policy, ARCCachePolicy)
    assert policy.cache_capacity == 3


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown eviction policy 'lur': did you mean 'lru'"):
        create_cache_policy("lur", 3)


def test_a_policy_of_one_s_own_is_built_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "own_policy_package")
    monkeypatch.syspath_prepend(tmp_path)

    assert create_cache_policy("own_policy_package.parts:Mine", 3).cache_capacity == 3
    with pytest.raises(
        NamedClassError, match=r"NeedsMore': building it for 3 blocks raised TypeError: .*'more'"
    ):
        create_cache_policy("own_policy_package.parts:NeedsMore", 3)
