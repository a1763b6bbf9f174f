"""The worker routes by media, turns a handler's failure into False, and asks every handler."""

from collections.abc import Mapping

import pytest

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.errors import DuplicateNameError
from kvtier.worker.worker import OffloadingWorker

DEVICE = GPULoadStoreSpec([0], [1], [0])
ROWS = CPULoadStoreSpec([0])


class TapeLoadStoreSpec(BlockIDsLoadStoreSpec):
    """A medium that nobody handles."""

    @staticmethod
    def medium() -> str:
        return "TAPE"


class FakeHandler(OffloadingHandler):
    """Ends every job at once, well; declines or raises when told to."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.finished: list[TransferResult] = []
        self.waited_for: set[TransferJobId] = set()
        self.num_shutdowns = 0

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            self.finished.append(TransferResult(job_id, success=True))
        return self.answer

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        self.waited_for |= job_ids

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def worker_of(store: OffloadingHandler, load: OffloadingHandler) -> OffloadingWorker:
    """Return a worker with a handler for each direction."""
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store)
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load)
    return worker


def test_each_direction_goes_to_its_handler_and_results_come_from_both() -> None:
    store, load = FakeHandler(), FakeHandler()
    worker = worker_of(store, load)

    assert worker.transfer_async(TransferJobId(1), TransferSpec(DEVICE, ROWS))
    assert worker.transfer_async(TransferJobId(2), TransferSpec(ROWS, DEVICE))

    assert [result.job_id for result in store.finished] == [1]
    assert [result.job_id for result in load.finished] == [2]
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    assert worker.get_finished() == []


def test_a_plain_tuple_is_a_transfer_too() -> None:
    assert worker_of(FakeHandler(), FakeHandler()).transfer_async(TransferJobId(1), (DEVICE, ROWS))  # type: ignore[arg-type]  # engines may hand over the tuple that the contract names


def test_a_second_handler_for_the_same_media_is_refused() -> None:
    worker = worker_of(FakeHandler(), FakeHandler())

    with pytest.raises(DuplicateNameError, match="GPU_to_CPU"):
        worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, FakeHandler())


@pytest.mark.parametrize("answer", [False, RuntimeError("broken"), MemoryError("none left")])
def test_a_handler_that_declines_or_raises_costs_its_own_job(answer: bool | Exception) -> None:
    worker = worker_of(FakeHandler(answer), FakeHandler())

    assert not worker.transfer_async(TransferJobId(1), TransferSpec(DEVICE, ROWS))
    assert worker.transfer_async(TransferJobId(2), TransferSpec(ROWS, DEVICE))
    assert [result.job_id for result in worker.get_finished()] == [2]


def test_media_that_nobody_handles_are_declined() -> None:
    worker = worker_of(FakeHandler(), FakeHandler())

    assert not worker.transfer_async(TransferJobId(1), TransferSpec(DEVICE, TapeLoadStoreSpec([0])))
    assert not worker.transfer_async(TransferJobId(1), TransferSpec(ROWS, ROWS))


def test_wait_and_shutdown_reach_every_handler() -> None:
    store, load = FakeHandler(), FakeHandler()
    worker = worker_of(store, load)

    worker.wait({TransferJobId(1)})
    worker.shutdown()

    assert store.waited_for == load.waited_for == {1}
    assert store.num_shutdowns == load.num_shutdowns == 1


class FakeJoiningHandler(FakeHandler):
    """Takes the even jobs of a call; raises when told to."""

    def __init__(self, answer: bool | Exception = True) -> None:
        super().__init__(answer)
        self.calls: list[list[TransferJobId]] = []

    def transfer_joined(self, jobs: Mapping[TransferJobId, TransferSpec]) -> set[TransferJobId]:
        self.calls.append(list(jobs))
        return {
            job_id for job_id, spec in jobs.items() if job_id % 2 == 0 and self.transfer_async(job_id, spec)
        }


def joined_jobs() -> dict[TransferJobId, TransferSpec]:
    """Return four stores, two loads and a transfer of media that have no handler."""
    return {
        TransferJobId(number): spec
        for number, spec in enumerate(
            [
                *[TransferSpec(DEVICE, ROWS)] * 2,
                *[TransferSpec(ROWS, DEVICE)] * 2,
                *[TransferSpec(DEVICE, ROWS)] * 2,
                TransferSpec(ROWS, ROWS),
            ]
        )
    }


def test_jobs_of_the_same_media_reach_a_handler_with_one_call_if_it_joins() -> None:
    store, load = FakeJoiningHandler(), FakeHandler()

    started = worker_of(store, load).transfer_joined(joined_jobs())

    assert store.calls == [[0, 1, 4, 5]]
    assert started == {0, 4, 2, 3}


def test_a_single_job_is_not_joined() -> None:
    store = FakeJoiningHandler()

    assert worker_of(store, FakeHandler()).transfer_joined(
        {TransferJobId(1): TransferSpec(DEVICE, ROWS)}
    ) == {1}
    assert store.calls == []


def test_a_handler_that_raises_costs_its_own_jobs() -> None:
    store, load = FakeJoiningHandler(RuntimeError("broken")), FakeHandler()

    assert worker_of(store, load).transfer_joined(joined_jobs()) == {2, 3}
