"""Tenants of requests: the setting, the numbers, and the keys that no other tenant makes."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import parse_settings
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.hints.values import parse_hints
from kvtier.namespace import digest_salt
from kvtier.tenants import (
    NO_TENANT,
    OTHERS_LABEL,
    UNNAMED_LABEL,
    Tenant,
    Tenants,
    make_tenants,
    salt_hash,
    tenant_number,
)

COLLIDING_NAME = "mallory-11628364"
"""A name whose number was once that of "alice"."""

TIERS = [{"type": "fs", "root_dir": "/x"}, {"type": "obj", "url": "file:///y"}]


def make(tenants: object, salt: str = "") -> Tenants:
    found = make_tenants(parse_settings({"tenants": tenants, "tenant_salt": salt, "secondary_tiers": TIERS}))
    assert found is not None
    return found


def find(tenants: Tenants, params: dict[str, object] | None) -> Tenant | None:
    return tenants.find(params, parse_hints(params))


def test_a_number_is_seven_bytes_of_a_digest_that_is_keyed_with_the_salt() -> None:
    for salt in ("", "secret"):
        key = bytes.fromhex(digest_salt(salt)) if salt else b""
        digest = hashlib.blake2b(b"alice", digest_size=7, key=key, person=b"kvtier tenant").digest()
        assert tenant_number("alice", salt) == int.from_bytes(digest, "big")


def test_the_last_three_bytes_of_a_number_are_never_all_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros:
        def digest(self) -> bytes:
            return b"\x01\x02\x03\x04\x00\x00\x00"

    monkeypatch.setattr("kvtier.tenants.hashlib.blake2b", lambda *_, **__: Zeros())
    assert tenant_number("alice") == 0x01020304000001


def test_who_knows_no_salt_finds_no_name_that_has_anothers_number() -> None:
    """Names that collide in 24 bits of an unkeyed hash, as a search of half a minute finds, share nothing more."""
    for salt in ("", "secret"):
        tenants = make({"alice": {}, "*": {}}, salt)
        alice, found = tenants.make("alice"), tenants.make(COLLIDING_NAME)
        assert old_number("alice") == old_number(COLLIDING_NAME)
        assert alice.number != found.number
        assert tenants.label_of(found.number) == OTHERS_LABEL


def test_what_is_searched_for_under_one_salt_collides_under_no_other() -> None:
    """In 20 bits of the new numbers names are found that collide; under another salt none of these pairs does."""
    cut = 2**20
    seen: dict[int, str] = {}
    pairs = []
    for name in map(str, range(4_000)):
        other = seen.setdefault(tenant_number(name, "one") % cut, name)
        if other != name:
            pairs.append((name, other))
    assert pairs
    for name, other in pairs:
        assert tenant_number(name, "other") % cut != tenant_number(other, "other") % cut


def old_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=3, person=b"kvtier tenant").digest())


def test_without_the_setting_there_are_no_tenants() -> None:
    assert make_tenants(parse_settings({})) is None


def test_a_listed_tenant_is_found_and_another_is_not_served() -> None:
    tenants = make({"alice": {}})
    found = find(tenants, {"tenant": "alice"})
    assert found is not None
    assert (found.name, found.number) == ("alice", tenant_number("alice"))
    assert find(tenants, {"tenant": "bob"}) is None
    assert find(tenants, {}) is find(tenants, None) is None


def test_the_star_serves_others_each_apart_and_requests_without_a_name() -> None:
    tenants = make({"*": {}})
    bob, carol = find(tenants, {"tenant": "bob"}), find(tenants, {"tenant": "carol"})
    assert bob is not None
    assert carol is not None
    assert bob.hash_key != carol.hash_key
    assert find(tenants, {}) == NO_TENANT


@pytest.mark.parametrize("name", ["", 5, True, ["alice"], "*", "a" * 129, "\ud800"])
def test_an_invalid_name_is_not_served_even_with_the_star(name: object) -> None:
    assert find(make({"*": {}}), {"tenant": name}) is None


def test_equal_hashes_of_two_tenants_become_different_ones_of_the_same_length() -> None:
    tenants = make({"alice": {}, "bob": {}})
    for length in (1, 8, 16, 32, 64):
        block_hash = bytes(range(length))
        hashes = {tenants.make(name).own_hash(block_hash) for name in ("alice", "bob")} | {block_hash}
        assert {len(one) for one in hashes} == {length}
        assert length == 1 or len(hashes) == 3


def test_the_salt_of_the_engine_changes_every_hash() -> None:
    plain, salted = make({"alice": {}}).make("alice"), make({"alice": {}}, "secret").make("alice")
    assert plain.number != salted.number
    assert plain.hash_key != salted.hash_key


@given(
    st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20), st.binary(min_size=16, max_size=32)
)
def test_no_two_names_share_a_hash(one: str, other: str, block_hash: bytes) -> None:
    tenants = make({"*": {}})
    found, second = find(tenants, {"tenant": one}), find(tenants, {"tenant": other})
    if found is not None and second is not None and one != other:
        assert found.own_hash(block_hash) != second.own_hash(block_hash)


def test_a_quota_is_a_size_or_one_for_host_memory() -> None:
    tenants = make({"alice": {"quota_bytes": "1KiB"}, "bob": {"quota_bytes": {"host": "2K"}}, "*": {}})
    assert tenants.quota_of(tenant_number("alice"), "host") == 1024
    assert tenants.quota_of(tenant_number("bob"), "host") == 2000
    assert tenants.quota_of(tenant_number("bob"), "fs") is None
    assert tenants.quota_of(tenant_number("carol"), "host") is None
    assert tenants.has_quota("host")
    assert not make({"alice": {}}).has_quota("host")
    assert make({"*": {"quota_bytes": "5B"}}).quota_of(tenant_number("carol"), "host") == 5


def test_a_quota_may_be_one_for_a_tier() -> None:
    tenants = make(
        {"alice": {"quota_bytes": {"fs": "1KiB"}}, "*": {"quota_bytes": {"fs": "10B", "host": "20B"}}}
    )
    assert tenants.quota_of(tenant_number("alice"), "fs") == 1024
    assert tenants.quota_of(tenant_number("alice"), "host") is None
    assert tenants.quota_of(0, "fs") == 10
    assert tenants.has_quota("fs")


def test_who_is_beyond_his_quota_is_told_by_how_much() -> None:
    tenants = make({"alice": {"quota_bytes": {"fs": "100B"}}, "bob": {}, "*": {"quota_bytes": {"fs": "10B"}}})
    alice, bob, carol = map(tenant_number, ("alice", "bob", "carol"))
    assert tenants.excesses({alice: 101, bob: 10**9, carol: 11, 0: 10}, "fs") == {alice: 1, carol: 1}
    assert tenants.excesses({alice: 101}, "host") == {}


def test_labels_are_the_listed_names_and_two_more() -> None:
    tenants = make({"alice": {}, "*": {}})
    assert tenants.label_of(tenant_number("alice")) == "alice"
    assert tenants.label_of(tenant_number("bob")) == OTHERS_LABEL
    assert tenants.label_of(0) == UNNAMED_LABEL


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        5,
        "alice",
        {"alice": 5},
        {"alice": {"quota_bytes": -1}},
        {"alice": {"quota_bytes": True}},
        {"alice": {"quota_bytes": "9" * 400}},
        {"alice": {"quota_bytes": {"host": 0}}},
        {"alice": {"quota_bytes": {"fs": "much"}}},
        {"": {}},
        {5: {}},
        {"\ud800": {}},
        {"a" * 129: {}},
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_short_line(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"quota": 5}, "quota"),
        ({"quota_bytes": {"valkey": 5}}, "valkey"),
        ({"quota_bytes": {"hots": 5}}, "hots"),
    ],
)
def test_an_unknown_setting_or_tier_is_refused_by_name(entry: object, name: str) -> None:
    with pytest.raises(UnknownNameError, match=name):
        make({"alice": entry})


def test_the_salt_is_in_no_repr() -> None:
    assert "geheim" not in repr(make({"alice": {}}, "geheim"))


def test_a_salted_hash_keeps_its_length() -> None:
    assert len(salt_hash(b"12345678", b"key")) == 8
