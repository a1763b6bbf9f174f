"""The connector of one process: builds the spec, then the half that the process runs."""

from collections.abc import Sequence
from functools import partial

from kvtier.config import ModelIdentity, OffloadingConfig
from kvtier.connector.common import ConnectorRole
from kvtier.connector.features import StepControl
from kvtier.connector.recording import RequestRecorder
from kvtier.connector.scheduler import FeatureMaker, OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.factory import OffloadingSpecFactory


class OffloadingConnector:
    """One half of offloading. An engine in one process builds two, one of each role.

    Args:
        config: the engine's configuration; with ``rank`` on a worker, without on the scheduler.
        role: which half to build.
        recorder: records the scheduler's requests, such as what ``kvtier.recording.recorder.open_recorder`` returns;
            None records nothing. The connector closes it, also when it cannot be built.
        control: serves operators of the scheduler half, such as what ``kvtier.observe.control.open_control`` returns;
            None serves none. The connector closes it as well.
        features: make what else is plugged into the scheduler half (``connector.features``).

    Attributes:
        spec: what the configuration asked for; it is this half's own.
        connector_scheduler: the scheduler half, or None.
        connector_worker: the worker half, or None.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        role: ConnectorRole,
        recorder: RequestRecorder | None = None,
        control: StepControl | None = None,
        features: Sequence[FeatureMaker] = (),
    ) -> None:
        self.role = role
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: OffloadingConnectorWorker | None = None
        try:
            self.spec = OffloadingSpecFactory.create_spec(config)
            if role is ConnectorRole.SCHEDULER:
                self.connector_scheduler = OffloadingConnectorScheduler(
                    self.spec, recorder, control=control, features=features
                )
            else:
                self.connector_worker = OffloadingConnectorWorker(self.spec)
        except BaseException:
            if recorder is not None:
                recorder.close()
            if control is not None:
                control.close(())
            raise

    def reset(self) -> None:
        """Forget every block, so that none stored before is found again, and store in an epoch of its own."""
        assert self.connector_scheduler is not None, "workers do not know which blocks are held"
        self.connector_scheduler.reset()

    def switch_model(self, model: ModelIdentity | None) -> None:
        """Forget every block, as a reset does, and go on with those of weights that were loaded in place.

        Args:
            model: the weights; what other engines have stored of them is found. None for weights that nothing names:
                their blocks are kept in host memory alone.
        """
        half = self.connector_scheduler
        assert half is not None, "workers do not know which blocks are held"
        half.reset(partial(half.manager.switch_model, model))

    def has_pending_push_work(self) -> bool:
        """Return whether stores are open, or a feature has work to do; further steps, which may be empty, end them.

        An engine that runs out of requests calls this before it rests. If it rested earlier, its last stores
        would be neither found nor handed to the secondary tiers before another request comes.
        """
        return self.connector_scheduler is not None and self.connector_scheduler.needs_step()

    def shutdown(self) -> None:
        """Shut down the half in this process; idempotent."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
        self.spec.shutdown()

    def __repr__(self) -> str:
        return f"OffloadingConnector({self.role.value}, {type(self.spec).__name__})"
