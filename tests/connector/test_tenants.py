"""Two tenants who send the same prompt never find each other's blocks; who is not listed is not served."""

import logging
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    keys_of,
    make_config,
    make_first_step,
    report_jobs,
)

from kvtier.base import OffloadKey, get_offload_block_hash, get_offload_tenant
from kvtier.config import GroupKind, KVGroup
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput
from kvtier.misses import UNKNOWN_TENANT_REASON, MissCause
from kvtier.observe.remedies import remedy_of
from kvtier.tenants import tenant_number

PROMPT = list(range(17))
TWO_GROUPS = (
    KVGroup(HASH_TOKENS, ("full",), 64),
    KVGroup(HASH_TOKENS, ("window",), 64, GroupKind.WINDOW, 8),
)


@dataclass(eq=False)
class SaltedRequest(FakeRequest):
    """A request as vLLM has it."""

    cache_salt: str | None = None


class Site:
    """A scheduler half with host memory and tenants."""

    def __init__(self, tenants: object, groups: tuple[KVGroup, ...] = (), **settings: object) -> None:
        self.manager = CPUOffloadingManager(256)
        more = {"groups": groups} if groups else {}
        config = make_config(tenants=tenants, **more, **settings)  # type: ignore[arg-type]  # the groups
        self.half = OffloadingConnectorScheduler(FakeSpec(config, self.manager))
        self.num_groups = len(config.groups)
        self._names = iter(range(10_000))

    def request(self, tenant: object, tokens: list[int] | None = None) -> FakeRequest:
        params = {} if tenant is None else {"tenant": tenant}
        return FakeRequest(f"r{next(self._names)}", PROMPT if tokens is None else tokens, params)

    def serve(self, tenant: object, tokens: list[int] | None = None, key_salt: bytes = b"") -> int:
        """Serve a request to its end; return the tokens that were found for it."""
        request = self.request(tenant, tokens)
        found, _ = self.half.get_num_new_matched_tokens(request, 0, key_salt)
        assert found is not None
        blocks = tuple(list(range(request.num_tokens)) for _ in range(self.num_groups))
        self.half.update_state_after_alloc(request, FakeBlocks(blocks), found)
        step = make_first_step(request.request_id, blocks, request.num_tokens)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(step)))
        self.half.request_finished(request)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(StepOutput())))
        return found

    @property
    def held(self) -> list[OffloadKey]:
        table = self.manager.table
        return list(table.slots.held_blocks(table.get_block))


def test_two_tenants_with_one_prompt_find_only_their_own() -> None:
    site = Site({"alice": {}, "bob": {}})
    assert [site.serve("alice"), site.serve("bob")] == [0, 0]
    assert [site.serve("alice"), site.serve("bob")] == [16, 16]
    assert {get_offload_tenant(key) for key in site.held} == {tenant_number("alice"), tenant_number("bob")}
    # The numbers aside, the hashes differ too.
    hashes = set(map(get_offload_block_hash, site.held))
    assert len(hashes) == 8
    assert not hashes & set(map(get_offload_block_hash, keys_of(PROMPT)))


def test_without_the_setting_a_tenant_is_a_hint_and_keys_are_as_ever() -> None:
    site = Site(None)
    assert [site.serve("alice"), site.serve("bob")] == [0, 16]
    assert set(site.held) == set(keys_of(PROMPT))
    assert site.half.stats()["connector.unknown_tenant_requests"] == 0


@pytest.mark.parametrize("tenant", ["mallory", None, 5, ""])
def test_an_unknown_tenant_is_served_and_neither_loads_nor_stores(tenant: object) -> None:
    site = Site({"alice": {}})
    site.serve("alice")
    held = set(site.held)
    assert [site.serve(tenant), site.serve(tenant)] == [0, 0]
    assert set(site.held) == held
    assert site.half.stats()["connector.unknown_tenant_requests"] == 2
    [run, partial] = site.half.records.latest[-1].missed
    assert (run.num_tokens, run.miss.cause) == (16, MissCause.LIMITED)
    assert run.miss.detail == {"reason": UNKNOWN_TENANT_REASON}
    assert "tenants" in remedy_of(run.miss)
    assert partial.miss.cause is MissCause.PARTIAL_BLOCK


def test_an_unknown_tenant_pins_and_renews_nothing() -> None:
    site = Site({"alice": {}})
    site.serve("alice")
    request = FakeRequest("m", PROMPT, {"tenant": "mallory", "pin_s": 60})
    site.half.get_num_new_matched_tokens(request, 0)
    assert site.manager.stats()["primary.leased_blocks"] == 0


def test_with_the_star_unnamed_requests_share_with_each_other_alone() -> None:
    site = Site({"alice": {}, "*": {}})
    assert [site.serve(None), site.serve("alice"), site.serve("bob")] == [0, 0, 0]
    assert [site.serve(None), site.serve("alice"), site.serve("bob"), site.serve("carol")] == [16, 16, 16, 0]


def test_an_adapter_and_a_tenant_are_both_part_of_a_key() -> None:
    site = Site({"alice": {}, "bob": {}})
    pairs = [("alice", b""), ("alice", b"x"), ("bob", b"x"), ("bob", b"y")]
    assert [site.serve(name, key_salt=salt) for name, salt in pairs] == [0] * 4
    assert [site.serve(name, key_salt=salt) for name, salt in pairs] == [16] * 4


def test_each_group_of_a_hybrid_model_keeps_tenants_apart() -> None:
    site = Site({"alice": {}, "bob": {}}, TWO_GROUPS)
    assert [site.serve("alice"), site.serve("bob")] == [0, 0]
    assert [site.serve("alice"), site.serve("bob")] == [16, 16]


@pytest.mark.parametrize(
    ("tenants", "salt", "num_said"),
    [
        ({"*": {}}, "", 1),
        ({"*": {}, "alice": {}}, "", 1),
        ({"*": {}}, "s", 0),
        ({"alice": {}}, "", 0),
        (None, "", 0),
    ],
)
def test_names_that_anybody_may_choose_without_a_salt_are_one_warning_for_an_engine(
    tenants: object, salt: str, num_said: int, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tenants, tenant_salt=salt)
    site.serve("bob")
    site.serve("bob")
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == num_said
    assert all("tenant_salt" in line and "search" in line for line in said)


def test_two_tenants_with_one_cache_salt_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    site = Site({"*": {}}, tenant_salt="s")

    def send(name: str, tenant: str, salt: str | None) -> None:
        request = SaltedRequest(name, PROMPT, {"tenant": tenant}, cache_salt=salt)
        site.half.get_num_new_matched_tokens(request, 0)

    with caplog.at_level(logging.WARNING):
        send("a", "alice", "one")
        send("b", "alice", "one")
        send("c", "bob", "two")
        assert not caplog.records
        send("d", "carol", "two")
        send("e", "dave", "one")
    [record] = caplog.records
    assert "cache_salt" in record.getMessage()
    assert "two" not in record.getMessage().replace("two tenants", "")


def test_two_tenants_without_cache_salt_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    site = Site({"*": {}}, tenant_salt="s")
    for name in ("alice", "bob"):
        site.half.get_num_new_matched_tokens(SaltedRequest(name, PROMPT, {"tenant": name}), 0)
    [record] = caplog.records
    assert "without cache_salt" in record.getMessage()


@given(st.integers(0, 2**32), st.booleans())
def test_traffic_of_tenants_is_found_as_if_each_had_an_engine_of_its_own(seed: int, is_salted: bool) -> None:
    """Prompts share prefixes; whatever is found for a tenant, one of his own requests has stored."""
    random_ = random.Random(seed)
    salt = "salt" if is_salted else ""
    shared = Site({"alice": {}, "bob": {}}, tenant_salt=salt)
    alone = {name: Site({name: {}}, tenant_salt=salt) for name in ("alice", "bob")}
    for _ in range(12):
        name = random_.choice(("alice", "bob"))
        tokens = [random_.randrange(2) for _ in range(random_.randrange(1, 20))]
        assert shared.serve(name, tokens) == alone[name].serve(name, tokens)
