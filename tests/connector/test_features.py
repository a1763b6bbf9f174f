"""A feature is called at its moments, in its turn, and decides what its hooks say it decides."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields

import pytest
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeRegionSpec,
    FakeRequest,
    FakeSpec,
    TableManager,
    keys_of,
    make_config,
    make_first_step,
    report_jobs,
)

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import GroupKind, KVGroup
from kvtier.connector import ConnectorRole, OffloadingConnector
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata, StopReason
from kvtier.connector.features import Hooks, RequestFeature, StepControl, Withheld
from kvtier.connector.jobs import JobKind, OpenTransfer
from kvtier.connector.protocols import ControlledHalf, SchedulerOutput
from kvtier.connector.request_state import RequestState
from kvtier.connector.scheduler import FeatureMaker, OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput, WorkerOutput
from kvtier.misses import Miss, MissCause, MissedRun

PROMPT = list(range(18))
TABLE = ([0, 1, 2, 3, 4],)
HELD: dict[OffloadKey, bool | None] = dict.fromkeys(keys_of(PROMPT), True)
OTHER = Miss(MissCause.LIMITED, "", {"reason": "a feature"})
PARTIAL = MissedRun(16, 2, Miss(MissCause.PARTIAL_BLOCK))


class WatchedManager(CPUOffloadingManager):
    """Writes down when it is told of what features are told of too."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(16)
        self._log = log

    def end_step(self) -> None:
        super().end_step()
        self._log.append("manager.end_step")

    def request_finished(self, req_context: ReqContext) -> None:
        super().request_finished(req_context)
        self._log.append("manager.request_finished")

    def reset(self) -> None:
        super().reset()
        self._log.append("manager.reset")

    def shutdown(self) -> None:
        super().shutdown()
        self._log.append("manager.shutdown")


class Witness(RequestFeature):
    """Writes down each call of a hook that changes nothing."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name

    def note(self, text: str) -> None:
        self.log.append(self.name + text)

    def on_arrived(self, state: RequestState) -> None:
        self.note(f"on_arrived {state.context.req_id}")

    def withholds(self, state: RequestState) -> bool:
        self.note("withholds")
        return False

    def limit(self, state: RequestState, first_token: int, end_token: int) -> int | None:
        self.note(f"limit {first_token} {end_token}")
        return end_token

    def shorten(self, state: RequestState, first_token: int, end_token: int) -> int:
        self.note(f"shorten {first_token} {end_token}")
        return end_token

    def on_begun(self, state: RequestState, num_loaded_tokens: int) -> None:
        self.note(f"on_begun {num_loaded_tokens} {dict(state.load.tokens_by_tier)}")

    def on_pinned(self, state: RequestState, num_loaded_tokens: int) -> None:
        self.note(f"on_pinned {num_loaded_tokens} {dict(state.load.tokens_by_tier)}")

    def plan_step(self, output: SchedulerOutput, plan: OffloadingConnectorMetadata) -> None:
        self.note(f"plan_step {len(output.num_scheduled_tokens)} {len(plan.store_jobs)}")

    def on_stored(self, state: RequestState, keys: Collection[OffloadKey]) -> None:
        self.note(f"on_stored {len(keys)}")

    def on_load_ended(self, job: OpenTransfer) -> None:
        self.note(f"on_load_ended {job.has_failed}")

    def on_report(self, report: OffloadingWorkerMetadata | None, ended_jobs: Sequence[OpenTransfer]) -> None:
        self.note(f"on_report {report is not None} {[job.kind.value for job in ended_jobs]}")

    def on_step_end(self) -> None:
        self.note("on_step_end")

    def on_finished(self, state: RequestState, stop: StopReason, is_traffic: bool) -> None:
        self.note(f"on_finished {state.context.req_id} {stop.name} {is_traffic}")

    def on_dropped(self, req_id: str) -> None:
        self.note(f"on_dropped {req_id}")

    def on_reset(self) -> None:
        self.note("on_reset")

    def close(self, unfinished: Collection[RequestState]) -> None:
        self.note(f"close {[state.context.req_id for state in unfinished]}")


class NotingControl(Witness, StepControl):
    """Control that only writes down."""

    has_commands = False

    def attach(self, half: ControlledHalf) -> RequestFeature:
        return self


def make_half(*features: RequestFeature, manager: TableManager | None = None) -> OffloadingConnectorScheduler:
    """Return a half with features, whose manager holds the prompt or answers from a table."""
    makers: list[FeatureMaker] = [lambda half, one=feature: one for feature in features]  # type: ignore[misc]
    return OffloadingConnectorScheduler(FakeSpec(make_config(), manager), features=makers)


def begin(half: OffloadingConnectorScheduler, num_loaded_tokens: int = 0) -> RequestState:
    """Search and begin a request; return its state."""
    request = FakeRequest("a", PROMPT)
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, FakeBlocks(TABLE), num_loaded_tokens)
    return half._requests["a"]


def test_the_hooks_of_a_request_and_of_its_steps_come_in_their_order() -> None:
    log: list[str] = []
    manager = WatchedManager(log)
    half = OffloadingConnectorScheduler(
        FakeSpec(make_config(), manager), features=[lambda half: Witness(log)]
    )
    first, second = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    half.get_num_new_matched_tokens(first, 0)
    metadata = half.build_connector_meta(make_first_step("a", TABLE, 18))
    half.update_connector_output(report_jobs(metadata))
    half.request_finished(first, StopReason.END_TURN)

    assert log == [
        "on_arrived a",
        "withholds",
        "limit 0 17",
        "shorten 0 0",
        "plan_step 1 0",
        "on_stored 4",
        "manager.end_step",
        "on_step_end",
        "on_report True ['store']",
        "on_finished a END_TURN True",
        "manager.request_finished",
    ]
    log.clear()
    num_found, _ = half.get_num_new_matched_tokens(second, 0)
    half.update_state_after_alloc(second, FakeBlocks(TABLE), num_found or 0)
    half.update_connector_output(report_jobs(half.build_connector_meta(StepOutput())))
    half.request_finished(second, is_traffic=False)

    assert log == [
        "on_arrived b",
        "withholds",
        "limit 0 17",
        "shorten 0 16",
        "on_begun 16 {}",
        "on_pinned 16 {'CPU': 16}",
        "plan_step 0 0",
        "manager.end_step",
        "on_step_end",
        "on_load_ended False",
        "on_report True ['load']",
        "on_finished b UNKNOWN False",
        "manager.request_finished",
    ]
    log.clear()
    half.update_connector_output(WorkerOutput(None))
    half.request_finished(FakeRequest("never searched", PROMPT))
    half.reset()
    half.get_num_new_matched_tokens(first, 0)
    half.shutdown()

    assert log[:4] == ["on_report False []", "on_dropped never searched", "on_reset", "manager.reset"]
    assert log[-2:] == ["close ['a']", "manager.shutdown"]


def test_features_are_called_as_they_were_given_and_control_last() -> None:
    log: list[str] = []
    half = OffloadingConnectorScheduler(
        FakeSpec(make_config()),
        control=NotingControl(log, "control "),
        features=[lambda half: Witness(log, "first "), lambda half: Witness(log, "second ")],
    )
    half.build_connector_meta(StepOutput())
    half.shutdown()

    assert [line.split()[0] for line in log] == ["first", "second", "control"] * 3


@pytest.mark.parametrize("hook", [hook.name for hook in fields(Hooks)])
def test_a_hook_has_only_the_features_that_override_it(hook: str) -> None:
    hooks = Hooks()
    hooks.add(RequestFeature())
    overriding = type("Overriding", (RequestFeature,), {hook: lambda *arguments: None})
    hooks.add(overriding())

    assert {each.name: len(getattr(hooks, each.name)) for each in fields(Hooks)} == {
        each.name: int(each.name == hook) for each in fields(Hooks)
    }


def test_every_method_of_a_feature_is_a_hook() -> None:
    methods = {name for name in vars(RequestFeature) if not name.startswith("_")}

    assert methods == {hook.name for hook in fields(Hooks)}


class Fixed(RequestFeature):
    """Gives one answer to each question."""

    def __init__(
        self,
        *,
        withholds: bool = False,
        limit: Callable[[int], int | None] = lambda end_token: end_token,
        shorten: Callable[[int], int] = lambda end_token: end_token,
        why: Withheld | None = None,
    ) -> None:
        self._withholds, self._limit, self._shorten, self._why = withholds, limit, shorten, why

    def withholds(self, state: RequestState) -> bool:
        return self._withholds

    def limit(self, state: RequestState, first_token: int, end_token: int) -> int | None:
        return self._limit(end_token)

    def shorten(self, state: RequestState, first_token: int, end_token: int) -> int:
        return self._shorten(end_token)

    def why_computed(self, state: RequestState) -> Withheld | None:
        return self._why


@pytest.mark.parametrize(
    ("feature", "answer", "num_asked"),
    [
        (Fixed(), (16, True), 4),
        (Fixed(withholds=True), (0, False), 0),
        (Fixed(limit=lambda _: 11), (8, True), 2),
        (Fixed(limit=lambda _: None), (None, False), 0),
        (Fixed(shorten=lambda _: 4), (4, True), 4),
        (Fixed(shorten=lambda _: 11), (8, True), 4),
        (Fixed(shorten=lambda _: 3), (0, False), 4),
    ],
)
def test_what_features_decide_is_the_answer(
    feature: Fixed, answer: tuple[int | None, bool], num_asked: int
) -> None:
    manager = TableManager(HELD)

    half = make_half(feature, manager=manager)

    assert half.get_num_new_matched_tokens(FakeRequest("a", PROMPT), 0) == answer
    assert len(manager.asked) == num_asked


@pytest.mark.parametrize(
    ("window", "answer"),
    [
        ([True, True, True, True], (8, True)),
        ([False, False, True, True], (0, False)),  # the tail of the whole prefix is not that of a shorter one
        ([True, False, True, True], (4, True)),
        ([True, None, True, True], (None, False)),
    ],
)
def test_a_shorter_prefix_is_loaded_only_with_its_own_window(
    window: list[bool | None], answer: tuple[int | None, bool]
) -> None:
    groups = (
        KVGroup(HASH_TOKENS, ("full",), 64),
        KVGroup(HASH_TOKENS, ("window",), 64, GroupKind.WINDOW, window_tokens=8),
    )
    manager = TableManager(HELD | dict(zip(keys_of(PROMPT, 1), window, strict=True)))
    half = OffloadingConnectorScheduler(
        FakeSpec(make_config(groups=groups), manager), features=[lambda _: Fixed(shorten=lambda _: 8)]
    )

    assert half.get_num_new_matched_tokens(FakeRequest("a", PROMPT), 0) == answer


def test_each_feature_sees_what_the_one_before_it_has_left() -> None:
    half = make_half(
        Fixed(limit=lambda end: end - 1, shorten=lambda end: end - 4),
        Fixed(limit=lambda end: end - 4, shorten=lambda end: end // 2),
        manager=TableManager(HELD),
    )

    assert half.get_num_new_matched_tokens(FakeRequest("a", PROMPT), 0) == (
        4,
        True,
    )  # (17 - 5, whole: 12; - 4) / 2


@pytest.mark.parametrize(
    ("why", "missed"),
    [
        (Withheld(OTHER), (MissedRun(0, 16, OTHER), PARTIAL)),
        (Withheld(OTHER, is_unsearched=True), (MissedRun(0, 16, OTHER), PARTIAL)),
        (
            Withheld(OTHER, {"CPU": 4, "fs": 8}, first_token=0),
            (
                MissedRun(0, 4, OTHER._replace(tier="host")),
                MissedRun(4, 8, OTHER._replace(tier="fs")),
                MissedRun(12, 4, Miss(MissCause.NEVER_SEEN)),
                PARTIAL,
            ),
        ),
    ],
)
def test_the_record_has_the_cause_that_a_feature_names(why: Withheld, missed: tuple[MissedRun, ...]) -> None:
    is_partial = bool(why.tokens_by_tier)
    half = make_half(Fixed(withholds=not is_partial, limit=lambda _: 0, why=why), manager=TableManager(HELD))
    begin(half)

    record = half.records.latest[-1]

    record.check()
    assert record.missed == missed


class Measuring(RequestFeature):
    """Adds a comparison of a device block to each step, and has it measured."""

    def __init__(self, half: OffloadingConnectorScheduler) -> None:
        self.half, self.ended = half, list[OpenTransfer]()

    def plan_step(self, output: SchedulerOutput, plan: OffloadingConnectorMetadata) -> None:
        state = self.half._requests["a"]
        job_id = self.half.jobs.open_store(state, [], [3], JobKind.AUDIT)
        plan.store_jobs[job_id] = plan.load_jobs.get(job_id)  # type: ignore[assignment]  # no worker reads it
        plan.measured_step = 7

    def on_report(self, report: OffloadingWorkerMetadata | None, ended_jobs: Sequence[OpenTransfer]) -> None:
        self.ended += ended_jobs

    def stats(self) -> dict[str, float]:
        return {"measuring.ended": float(len(self.ended))}


def test_a_feature_adds_jobs_and_a_measurement_to_a_step_and_numbers_to_the_stats() -> None:
    half = OffloadingConnectorScheduler(FakeSpec(make_config()), features=[Measuring])
    begin(half)

    metadata = half.build_connector_meta(StepOutput())
    assert metadata.measured_step == 7
    assert half.has_open_stores()
    half.update_connector_output(report_jobs(metadata))

    assert half.stats()["measuring.ended"] == 1.0
    assert not half.has_open_stores()


class Restless(RequestFeature):
    """Wants a step until it had one."""

    def __init__(self, half: OffloadingConnectorScheduler) -> None:
        self.is_done = False

    def needs_step(self) -> bool:
        return not self.is_done

    def on_step_end(self) -> None:
        self.is_done = True


def test_a_connector_has_work_while_a_feature_wants_a_step() -> None:
    connector = OffloadingConnector(
        make_config(cpu_bytes_to_use="1MiB"), ConnectorRole.SCHEDULER, features=[Restless]
    )
    assert connector.connector_scheduler is not None
    assert connector.has_pending_push_work()
    connector.connector_scheduler.build_connector_meta(StepOutput())

    assert not connector.has_pending_push_work()
    connector.shutdown()


def test_features_are_called_before_the_workers_have_connected() -> None:
    log: list[str] = []
    half = OffloadingConnectorScheduler(FakeRegionSpec(make_config()), features=[lambda half: Witness(log)])
    half.get_num_new_matched_tokens(FakeRequest("a", PROMPT), 0)
    half.build_connector_meta(StepOutput())

    assert log == ["on_arrived a", "plan_step 0 0", "on_step_end"]  # nothing is searched


@pytest.mark.parametrize("is_aborted", [False, True])
def test_the_records_keep_nothing_of_a_request_that_has_ended(is_aborted: bool) -> None:
    half = make_half()
    half.manager.prepare_store(keys_of(PROMPT), ReqContext("before"))
    half.manager.complete_store(keys_of(PROMPT), ReqContext("before"))
    state = begin(half, num_loaded_tokens=16)
    metadata = half.build_connector_meta(StepOutput())
    if is_aborted:
        half.request_finished(state.request)
    half.update_connector_output(report_jobs(metadata))
    if not is_aborted:
        half.request_finished(state.request)

    assert half.records.latest[-1].tokens_by_origin == {"host": 16}
    assert not half.records._begun
    assert not half.records._loading
