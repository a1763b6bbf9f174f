"""Policies are found by name, and a misspelt name is met with the nearest one."""

import pytest

from kvtier.cpu.policies import CACHE_POLICIES, create_cache_policy
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import UnknownNameError


def test_built_in_policies_are_built_with_their_capacity() -> None:
    assert {"fifo", "lru", "arc", "s3fifo", "sieve", "mq"} <= set(CACHE_POLICIES.names())
    assert isinstance(create_cache_policy("lru", 3), LRUCachePolicy)
    policy = create_cache_policy("arc", 3)
    assert isinstance(policy, ARCCachePolicy)
    assert policy.cache_capacity == 3


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown eviction policy 'lur': did you mean 'lru'"):
        create_cache_policy("lur", 3)
