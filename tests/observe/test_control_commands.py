"""What operators want done is done at the end of a step: pins, prefetches, purges and drains of real books."""

import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from tests.connector.fakes import (
    FakeBlocks,
    FakeRequest,
    TableManager,
    hash_tokens,
    keys_of,
    make_config,
    make_first_step,
)
from tests.observe.conftest import MakeControlled
from tests.observe.controlled import GUARD_S, Background, Engine

from kvtier.base import OffloadKey, ReqContext
from kvtier.connector.groups import GroupLayout
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput
from kvtier.errors import ControlError
from kvtier.observe.control import MAX_COMMANDS
from kvtier.observe.control_commands import (
    NO_EXTRAS,
    Drain,
    ExtrasHasher,
    PromptExtras,
    PromptPrefix,
    make_command,
    read_prefix,
    read_purged_tenant,
)
from kvtier.observe.control_wire import Message
from kvtier.tenants import parse_tenants, tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.base import (
    CascadeMode,
    JobMetadata,
    JobResult,
    PurgeOutcome,
    SecondaryTierManager,
    TierSettings,
)
from kvtier.tiering.example import ExampleSecondaryTier

PROMPT = list(range(17))
OTHER = list(range(100, 117))


def carry_out(engine: Engine, command: str, **arguments: object) -> Message:
    """Have a client give a command while the engine steps; return the reply."""
    client = Background(lambda: engine.ask(command, **arguments))
    while client.is_running:
        engine.step()
        time.sleep(0)
    reply = client.join()
    if isinstance(reply, ControlError):
        raise reply
    assert isinstance(reply, dict)
    return reply


@pytest.fixture
def engine(make_controlled: MakeControlled) -> Engine:
    made = make_controlled("engine", CPUOffloadingManager(40))
    made.store("a", PROMPT)
    return made


@pytest.fixture
def driver() -> TieringDriver:
    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        return [
            ExampleSecondaryTier(
                make_config(), view, settings=TierSettings(emit_events=True), simulate_async=True
            )
        ]

    return TieringDriver(40, make_tiers)


@pytest.fixture
def tiered(make_controlled: MakeControlled, driver: TieringDriver) -> Iterator[Engine]:
    """An engine whose tier has the prompt, and whose host memory has it too."""
    made = make_controlled("engine", driver.manager)
    made.store("a", PROMPT)
    carry_out(made, "drain")
    yield made
    driver.manager.check()


def test_a_pinned_prefix_outlives_pressure_until_it_is_unpinned(engine: Engine) -> None:
    assert carry_out(engine, "pin", token_ids=PROMPT, lease_s=60) == {
        "ok": True,
        "num_blocks": 4,
        "num_ready": 4,
        "num_pinned": 4,
        "limit": 4,
    }
    for number in range(20):
        engine.store(f"other {number}", list(range(1000 * (number + 1), 1000 * (number + 1) + 17)))
    assert engine.half.get_num_new_matched_tokens(FakeRequest("b", [*PROMPT, 9]), 0)[0] == 16
    assert carry_out(engine, "unpin", token_ids=PROMPT[:9])["num_blocks"] == 2
    assert carry_out(engine, "unpin", all=True)["num_blocks"] == 2


def test_a_prefix_that_was_never_seen_is_refused_and_takes_nothing_of_the_quota(engine: Engine) -> None:
    with pytest.raises(ControlError, match="nothing is pinned: host memory has none of the 4 blocks"):
        carry_out(engine, "pin", token_ids=list(range(900, 916)))
    assert engine.half.stats()["primary.leased_blocks"] == 0.0

    longer = [*PROMPT[:12], *range(900, 904)]  # a block of it is to come
    assert carry_out(engine, "pin", token_ids=longer)["num_blocks"] == 4


def test_too_long_a_prefix_is_refused_and_nothing_is_pinned(engine: Engine) -> None:
    with pytest.raises(ControlError, match="5 blocks cannot be pinned: 0 of at most 4"):
        carry_out(engine, "pin", token_ids=[*PROMPT[:16], *range(900, 904)])

    assert engine.half.stats()["primary.leased_blocks"] == 0.0


def test_a_prefix_shorter_than_a_block_is_refused(engine: Engine) -> None:
    with pytest.raises(ControlError, match="a prefix of 3 tokens is shorter than a block, 4 tokens"):
        carry_out(engine, "pin", token_ids=[1, 2, 3])


@pytest.mark.parametrize(
    "token_ids", [None, [], "text", [1, "2"], [1, True], [-1], [2**40], {"a": 1}, [1.5]], ids=str
)
def test_wrong_token_ids_are_refused_at_once(engine: Engine, token_ids: object) -> None:
    with pytest.raises(ControlError, match=r"token_ids=.*must be"):
        engine.ask("pin", token_ids=token_ids)


@pytest.mark.parametrize("lease_s", [-1, "x", 1e9, None])
def test_a_wrong_lease_is_refused(engine: Engine, lease_s: object) -> None:
    with pytest.raises(ControlError, match=r"lease_s=.*must be a number from 0 to 86400"):
        engine.ask("pin", token_ids=PROMPT, lease_s=lease_s)


class SaltedHasher(ExtrasHasher):
    """Hashes prompts as the fake engine does, salts and adapters included."""

    def __call__(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> list[bytes]:
        if extras.adapter == "unknown":
            raise ControlError("adapter='unknown': send a request with it first")
        more = f"{extras.cache_salt}/{extras.adapter}".encode() if extras != NO_EXTRAS else b""
        return [sha256(block_hash + more).digest() for block_hash in hash_tokens(list(token_ids))]


def keys_named(**request: object) -> list[OffloadKey]:
    prefix = read_prefix({"token_ids": PROMPT, **request}, SaltedHasher())
    return prefix.list_keys([GroupLayout(0, 4, 1, 1, None)])


def test_prompts_with_a_salt_or_an_adapter_have_keys_of_their_own() -> None:
    named = [{}, {"cache_salt": "a"}, {"adapter": "a"}, {"cache_salt": "a", "adapter": "a"}]
    found = [tuple(keys_named(**one)) for one in named]
    assert len(set(found)) == 4
    assert keys_named(cache_salt=None, adapter=None) == list(found[0])
    with pytest.raises(ControlError, match="adapter='unknown': send a request with it first"):
        keys_named(adapter="unknown")


@pytest.mark.parametrize("value", ["", 1, True, [], "a" * 5000])
def test_what_is_no_salt_or_adapter_is_refused_and_no_salt_is_shown(value: object) -> None:
    with pytest.raises(ControlError, match=r"adapter=.*: must be a text of 1 to 4096 characters"):
        keys_named(adapter=value)
    with pytest.raises(ControlError, match=r"^cache_salt=\.\.\.: must be a text"):
        keys_named(cache_salt=value)


@pytest.mark.parametrize("name", ["cache_salt", "adapter"])
def test_an_engine_whose_prompts_have_none_says_so(engine: Engine, name: str) -> None:
    with pytest.raises(
        ControlError, match=f"{name}: prompts of this engine have no cache salt and no adapter"
    ):
        carry_out(engine, "prefetch", token_ids=PROMPT, **{name: "secret"})


def test_an_engine_that_does_not_say_how_it_hashes_says_so() -> None:
    with pytest.raises(ControlError, match="give open_control a hash_prompt"):
        make_command("pin", {"token_ids": PROMPT}, None)
    assert isinstance(make_command("drain", {}, None), Drain)


def test_a_manager_without_the_ability_says_so(make_controlled: MakeControlled) -> None:
    engine = make_controlled("engine", TableManager({}))
    for command in ("pin", "purge"):
        with pytest.raises(ControlError, match=f"TableManager, cannot {command}"):
            carry_out(engine, command, token_ids=PROMPT, all=True)


def test_a_purge_forgets_host_memory(engine: Engine) -> None:
    carry_out(engine, "pin", token_ids=PROMPT, lease_s=60)

    assert carry_out(engine, "purge", all=True) == {
        "ok": True,
        "num_purged": {"host": 4},
        "num_in_use": {"host": 0},
        "unable": {},
    }
    assert engine.half.get_num_new_matched_tokens(FakeRequest("b", [*PROMPT, 9]), 0) == (0, False)


def test_a_purge_without_a_selector_asks_for_all(engine: Engine) -> None:
    for tiers in (None, [], "host", [1]):
        with pytest.raises(ControlError, match="must be a list of tiers, or give all=true"):
            engine.ask("purge", tiers=tiers)
    with pytest.raises(ControlError, match="unknown tier 'hots': did you mean 'host'"):
        carry_out(engine, "purge", tiers=["hots"])


def test_a_block_that_is_being_loaded_stays(engine: Engine) -> None:
    request = FakeRequest("b", [*PROMPT, 9])
    num_tokens, _ = engine.half.get_num_new_matched_tokens(request, 0)
    engine.half.update_state_after_alloc(request, FakeBlocks(([1, 2, 3, 4, 5],)), num_tokens or 0)
    reply = carry_out(engine, "purge", all=True)

    assert (reply["num_purged"], reply["num_in_use"]) == ({"host": 0}, {"host": 4})


def test_a_purge_of_all_reaches_the_tiers_that_can(tiered: Engine, driver: TieringDriver) -> None:
    list(driver.manager.take_events())
    reply = carry_out(tiered, "purge", all=True)

    assert (reply["num_purged"], reply["unable"]) == ({"host": 4, "example": 4}, {})
    removed = [event for event in driver.manager.take_events() if event.removed]
    assert sorted((event.medium, sorted(event.keys)) for event in removed) == [
        ("CPU", sorted(keys_of(PROMPT))),
        ("example", sorted(keys_of(PROMPT))),
    ]
    assert tiered.half.get_num_new_matched_tokens(FakeRequest("b", [*PROMPT, 9]), 0) == (0, False)


def test_what_a_purged_tier_was_still_to_get_is_not_counted_as_lost(make_controlled: MakeControlled) -> None:
    settings = TierSettings(cascade=CascadeMode.ON_EVICT)
    driver = TieringDriver(40, lambda view: [ExampleSecondaryTier(make_config(), view, settings=settings)])
    engine = make_controlled("engine", driver.manager)
    engine.store("a", PROMPT)
    assert engine.half.stats()["tier.0.example.pending_blocks"] == 4.0
    carry_out(engine, "purge", tiers=["host"])
    driver.manager.check()

    assert engine.half.stats()["tier.0.example.pending_blocks"] == 0.0
    assert carry_out(engine, "drain") == {"ok": True, "num_lost_blocks": 0, "num_pending_blocks": 0}


class StubbornTier(SecondaryTierManager):
    """Stores nothing, and cannot be purged."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(make_config(), view)
        self.ended: list[JobResult] = []

    @staticmethod
    def get_tier_type() -> str:
        return "stubborn"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def submit_store(self, job: JobMetadata) -> None:
        self.ended.append(JobResult(job.job_id, success=True))

    submit_load = submit_store

    def get_finished(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def reset(self, epoch: bytes) -> None:
        return


def test_a_purge_says_which_tiers_cannot(make_controlled: MakeControlled) -> None:
    driver = TieringDriver(40, lambda view: [StubbornTier(view)])
    engine = make_controlled("engine", driver.manager)
    engine.store("a", PROMPT)
    reply = carry_out(engine, "purge", all=True)

    reason = "a tier of this type cannot purge while its engine runs"
    assert (reply["num_purged"], reply["unable"]) == ({"host": 4}, {"stubborn": reason})
    assert carry_out(engine, "purge", tiers=["stubborn"])["unable"] == {"stubborn": reason}


def test_a_purge_that_takes_long_goes_on_without_its_client(
    make_controlled: MakeControlled,
) -> None:
    class SlowTier(ExampleSecondaryTier):
        """Removes until the test says that it has ended."""

        outcome: PurgeOutcome | int = 3
        num_begun = 0

        def purge(self, tenant: int | None = None) -> None:  # type: ignore[override]  # never at once
            self.num_begun += 1

        def poll_purge(self) -> PurgeOutcome | int:
            return self.outcome

    clock = ManualClock()
    driver = TieringDriver(40, lambda view: [SlowTier(make_config(), view)])
    (tier,) = driver.tiers
    assert isinstance(tier, SlowTier)
    engine = make_controlled("engine", driver.manager, clock=clock)
    client = Background(lambda: engine.ask("purge", tiers=["example"]))
    while client.is_running:
        engine.step()
        if tier.num_begun:
            clock.advance(GUARD_S)
        time.sleep(0)
    assert "3 blocks are removed so far, and the engine goes on with it" in str(client.join())
    tier.outcome = PurgeOutcome(4)
    assert carry_out(engine, "purge", tiers=["example"])["num_purged"] == {"example": 4}


def test_a_prefetch_brings_a_prefix_from_a_tier(tiered: Engine, driver: TieringDriver) -> None:
    carry_out(tiered, "purge", tiers=["host"])
    assert tiered.half.stats()["primary.held_blocks"] == 0.0

    reply = carry_out(tiered, "prefetch", token_ids=[*PROMPT, *OTHER])
    assert (reply["num_blocks"], reply["num_ready"]) == (8, 4)
    assert all(driver.primary.is_ready(key) for key in keys_of(PROMPT))
    # Nothing waits any more: all of it may be evicted.
    assert driver.primary.num_evictable == 4


def test_a_prefetch_whose_client_has_gone_holds_nothing(tiered: Engine, driver: TieringDriver) -> None:
    carry_out(tiered, "purge", tiers=["host"])
    command = make_command("prefetch", {"token_ids": PROMPT}, tiered.hash_prompt)
    assert command.advance(tiered.half, 0.0) is None
    assert "waits for no more" in command.describe_progress()
    command.abandon(tiered.half)
    for _ in range(3):
        tiered.step()

    assert driver.primary.table.holds == {}


@pytest.mark.parametrize("ending", ["its client hangs up", "its time is over", "the socket closes"])
def test_a_command_that_has_begun_is_undone_when_it_cannot_be_answered(
    tiered: Engine, driver: TieringDriver, ending: str
) -> None:
    carry_out(tiered, "purge", tiers=["host"])
    timeout_s = 0.0 if ending == "its time is over" else GUARD_S
    ask = tiered.control.begin({"do": "prefetch", "token_ids": PROMPT, "timeout_s": timeout_s})
    tiered.step()
    assert tiered.control.has_commands
    if ending == "its client hangs up":
        ask.cancel()
    elif ending == "its time is over":
        assert "prefetch has not ended in 0 s: 0 of 4 blocks" in str(ask.poll())
    else:
        tiered.control.close()
    for _ in range(4):
        tiered.step()

    assert driver.primary.table.holds == {}


@pytest.mark.parametrize("ending", ["its client hangs up", "its time is over"])
def test_a_command_that_no_client_waits_for_goes_no_further(engine: Engine, ending: str) -> None:
    step = make_first_step("never reported", (list(range(20, 25)),), len(OTHER))
    engine.half.get_num_new_matched_tokens(FakeRequest("never reported", OTHER), 0)
    engine.step(step)
    ask = engine.control.begin(
        {"do": "drain", "timeout_s": GUARD_S if ending == "its client hangs up" else 0.0}
    )
    engine.step()
    assert engine.control.has_commands
    if ending == "its client hangs up":
        ask.cancel()
    else:
        assert "drain has not ended in 0 s" in str(ask.poll())
    engine.step()

    assert not engine.control.has_commands


def test_commands_beyond_the_limit_are_refused_until_a_step_has_taken_those_that_wait(engine: Engine) -> None:
    for _ in range(MAX_COMMANDS):
        engine.control.begin({"do": "drain"})
    with pytest.raises(ControlError, match=f"{MAX_COMMANDS} commands wait for the engine's next step"):
        engine.control.begin({"do": "drain"})
    engine.step()

    assert carry_out(engine, "drain")["ok"] is True


def test_a_pinned_prefix_stays_while_a_tier_promotes_others(tiered: Engine, driver: TieringDriver) -> None:
    carry_out(tiered, "pin", token_ids=PROMPT, lease_s=60)
    driver.manager.check()
    for number in range(20):
        tiered.store(f"other {number}", list(range(1000 * (number + 1), 1000 * (number + 1) + 17)))
        driver.manager.check()
    assert all(driver.primary.is_ready(key) for key in keys_of(PROMPT))
    driver.clock.advance(60.0)
    tiered.step()

    assert driver.primary.table.holds == {}


def test_a_reset_ends_pins_of_a_manager_with_tiers(tiered: Engine, driver: TieringDriver) -> None:
    carry_out(tiered, "pin", token_ids=PROMPT, lease_s=60)
    tiered.half.reset()
    driver.manager.check()

    assert driver.primary.table.holds == {}


def test_a_drain_ends_when_the_tiers_have_what_was_pending(
    make_controlled: MakeControlled, driver: TieringDriver
) -> None:
    engine = make_controlled("engine", driver.manager)
    engine.store("a", PROMPT)
    carry_out(engine, "drain")

    (tier,) = driver.tiers
    assert all(tier.lookup(key, ReqContext("x")) for key in keys_of(PROMPT))


def test_the_keys_of_a_prefix_are_those_that_its_load_reads() -> None:
    full = GroupLayout(0, 4, 1, 1, None)
    window = GroupLayout(1, 4, 2, 2, 8)
    hashes = [bytes([number]) for number in range(7)]
    keys = PromptPrefix(28, hashes).list_keys([full, window])

    assert [key[:1] for key in keys if key[-1] == 0] == hashes[:6]
    assert [key[:1] for key in keys if key[-1] == 1] == [hashes[5]]


def test_a_failing_command_ends_neither_the_engine_nor_the_socket(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    def fail(tiers: object, tenant: object) -> None:
        raise ZeroDivisionError("a foreign manager's own")

    monkeypatch.setattr(engine.manager, "purge", fail)
    with pytest.raises(ControlError, match="ZeroDivisionError: a foreign manager's own"):
        carry_out(engine, "purge", all=True)

    assert "a command of the control socket failed" in caplog.text
    assert engine.step(StepOutput()) is not None
    assert engine.ask("hello")["ok"]


@pytest.mark.parametrize("salt", ["", "geheim"])
def test_a_purge_names_a_tenant_by_the_number_that_its_keys_have(salt: str) -> None:
    tenants = parse_tenants({"alice": {}}, salt, ())
    number = read_purged_tenant({"tenant": "alice"}, tenants)
    assert number == tenants.make("alice").number == tenant_number("alice", salt)
