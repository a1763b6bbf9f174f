"""Which way to copy is chosen: by what can be used, by proof on scratch memory, by measured rates."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.cpu.cuda.test_descriptors import layout_of

from kvtier.config import CudaCopier
from kvtier.cpu.cuda.copy_autotune import CopyMethod, Trial, build_span_copier, choose, pick, plan_trial
from kvtier.cpu.cuda.copy_methods import RunLauncher
from kvtier.cpu.cuda.descriptors import Spans
from kvtier.cpu.cuda.span_copier import DeviceCopier, Memories
from kvtier.cpu.row_layout import GroupMoves, RowLayout
from kvtier.errors import ConfigError, DeviceCopyError

BATCH, RUNS, STAGED, KERNEL = CudaCopier.BATCH, CudaCopier.RUNS, CudaCopier.STAGED, CudaCopier.KERNEL
AUTO = CudaCopier.AUTO
PROOF_BYTES = 1500
"""More than a proof of the layout below copies, and less than what is timed."""


class Stopwatch:
    """Time that passes when a fake copier says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self, copy: Callable[[], None]) -> float:
        begun_s = self.now_s
        copy()
        return self.now_s - begun_s


@dataclass(frozen=True)
class Way:
    """A candidate of the test.

    Attributes:
        store_s: what its stores take.
        load_s: what its loads take.
        fault: "drop" leaves the last span out, "raise" raises, "large" raises once a transfer is larger than a
            proof's; of stores only where it ends in " stores".
        unusable_reason: why it cannot be used.
    """

    store_s: float = 1.0
    load_s: float = 1.0
    fault: str | None = None
    unusable_reason: str | None = None


class FaultyLauncher:
    """Copies as it should, but for what its way says."""

    def __init__(self, memories: Memories, way: Way, watch: Stopwatch) -> None:
        self._runs = RunLauncher(memories)
        self._way = way
        self._watch = watch

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        fault = self._way.fault or ""
        if fault.endswith(" stores") and not is_store:
            fault = ""
        if fault.startswith("raise"):
            raise RuntimeError("CUDA error: not supported")
        if fault.startswith("large") and spans.sizes.sum() > PROOF_BYTES:
            raise RuntimeError("CUDA error: out of memory")
        if fault.startswith("drop"):
            spans = Spans(*(column[:-1] for column in spans))
        self._runs.launch(spans, is_store=is_store)
        self._watch.now_s += self._way.store_s if is_store else self._way.load_s


class Start:
    """A trial, and candidates that behave as a table says."""

    def __init__(self, ways: dict[CudaCopier, Way], layout: RowLayout | None = None) -> None:
        self.watch = Stopwatch()
        self.layout = layout_of([64, 32], [48], factor=2) if layout is None else layout
        strides = (64, 32, 48)
        plan = plan_trial(self.layout, strides, self.layout.part_bytes, 0, 40 * self.layout.part_bytes)
        whole_rows = torch.zeros((plan.num_slots, plan.row_stride), dtype=torch.int8)
        self.trial = Trial(plan, torch.device("cpu"), whole_rows, 2, self.watch.time)
        self.candidates = [self._candidate(name, way) for name, way in ways.items()]

    def choose(self, wanted: CudaCopier = AUTO) -> tuple[CudaCopier, CudaCopier]:
        choice = choose(self.candidates, wanted, self.trial)
        return choice.store.name, choice.load.name

    def _candidate(self, name: CudaCopier, way: Way) -> CopyMethod:
        def build(
            layout: RowLayout, pages: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int | None
        ) -> DeviceCopier:
            return build_span_copier(
                lambda memories: FaultyLauncher(memories, way, self.watch), layout, pages, rows, chunk
            )

        return CopyMethod(name, build, way.unusable_reason)


@pytest.mark.parametrize(
    ("ways", "chosen"),
    [
        ({BATCH: Way(), RUNS: Way(2, 2)}, (BATCH, BATCH)),
        ({BATCH: Way(2, 1), RUNS: Way(1, 2)}, (RUNS, BATCH)),
        ({BATCH: Way(1.04, 1.1), KERNEL: Way(1, 1)}, (BATCH, KERNEL)),
        ({BATCH: Way(unusable_reason="no driver"), RUNS: Way(9, 9)}, (RUNS, RUNS)),
        ({BATCH: Way(fault="raise"), STAGED: Way(9, 9)}, (STAGED, STAGED)),
        ({BATCH: Way(fault="drop"), STAGED: Way(9, 9)}, (STAGED, STAGED)),
        ({BATCH: Way(fault="large"), STAGED: Way(9, 9)}, (STAGED, STAGED)),
        ({BATCH: Way(fault="drop stores"), STAGED: Way(9, 9)}, (STAGED, BATCH)),
    ],
)
def test_each_direction_takes_the_fastest_that_moves_the_right_bytes(
    ways: dict[CudaCopier, Way], chosen: tuple[CudaCopier, CudaCopier]
) -> None:
    assert Start(ways).choose() == chosen


def test_what_was_chosen_is_logged_with_its_rates_and_what_was_not_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ways = {
        BATCH: Way(fault="drop"),
        RUNS: Way(),
        STAGED: Way(2, 2),
        KERNEL: Way(unusable_reason="no Triton"),
    }

    Start(ways).choose()

    assert "stores are made with 'runs'; measured runs" in caplog.text
    assert "staged 0.0 GB/s" in caplog.text
    assert "loads with 'batch' are skipped: group 0: pages have wrong bytes" in caplog.text
    assert "copies with 'kernel' are skipped: no Triton" in caplog.text


def test_a_way_that_was_asked_for_is_taken_though_others_are_faster() -> None:
    assert Start({BATCH: Way(), STAGED: Way(9, 9)}).choose(STAGED) == (STAGED, STAGED)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (Way(unusable_reason="the driver is too old"), "cuda_copier='batch': the driver is too old"),
        (Way(fault="drop"), "stores fail: group 0: rows have wrong bytes"),
        (Way(fault="raise"), "stores fail: RuntimeError: CUDA error: not supported"),
    ],
)
def test_a_way_that_was_asked_for_and_fails_is_refused(way: Way, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Start({BATCH: way, RUNS: Way()}).choose(BATCH)


def test_where_no_way_moves_the_right_bytes_the_start_fails() -> None:
    with pytest.raises(DeviceCopyError, match="no way of stores moves the right bytes"):
        Start({BATCH: Way(fault="raise"), RUNS: Way(fault="drop")}).choose()


@pytest.mark.parametrize(("wanted", "taken"), [(AUTO, RUNS), (STAGED, STAGED)])
def test_without_memory_for_a_trial_nothing_is_proven_and_that_is_said(
    wanted: CudaCopier, taken: CudaCopier, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start({BATCH: Way(), RUNS: Way(), STAGED: Way()})

    choice = choose(start.candidates, wanted, None)

    assert choice.store.name is choice.load.name is taken
    assert "unproven" in caplog.text


@pytest.mark.parametrize(
    ("rates", "picked"),
    [
        ({BATCH: 10.0, KERNEL: 10.5}, BATCH),
        ({BATCH: 10.0, KERNEL: 10.6}, KERNEL),
        ({BATCH: 1.0, RUNS: 9.6, KERNEL: 10.0}, RUNS),
        ({STAGED: 0.001}, STAGED),
    ],
)
def test_among_about_equals_the_one_that_leaves_more_of_the_device_to_the_model_is_picked(
    rates: dict[CudaCopier, float], picked: CudaCopier
) -> None:
    assert pick(rates) is picked


def test_copiers_of_the_trial_are_released() -> None:
    start = Start({RUNS: Way()})
    released: list[str] = []
    inner = start.candidates[0]

    class Watched:
        def __init__(self, copier: DeviceCopier) -> None:
            self._copier = copier

        def store(self, moves: Sequence[GroupMoves]) -> None:
            self._copier.store(moves)

        def load(self, moves: Sequence[GroupMoves]) -> None:
            self._copier.load(moves)

        def release(self) -> None:
            released.append("runs")
            self._copier.release()

    start.candidates[0] = CopyMethod(
        RUNS, lambda layout, pages, rows, chunk: Watched(inner.build(layout, pages, rows, chunk))
    )

    start.choose()

    assert released == 4 * ["runs"]
