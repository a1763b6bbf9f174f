"""Both halves of kvtier's connector in one process: how they are opened and ended."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from kvtier.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec
from kvtier.config import OffloadingConfig
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.observe.control import describe_start, open_control
from kvtier.observe.control_commands import PromptHasher
from kvtier.recording.recorder import open_recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectorHalves:
    """The halves, and what they were built from.

    Attributes:
        scheduler: decides what is loaded and stored.
        worker: copies it.
        specs: one for each half, because each maps the region itself.
    """

    scheduler: OffloadingConnectorScheduler
    worker: OffloadingConnectorWorker
    specs: tuple[OffloadingSpec, ...]

    @classmethod
    def open(
        cls,
        config: OffloadingConfig,
        make_spec: Callable[[OffloadingConfig], OffloadingSpec],
        kv_caches: CanonicalKVCaches,
        clock: Callable[[], float],
        hash_prompt: PromptHasher,
    ) -> Self:
        """Build the manager, the tiers and the handlers.

        Args:
            config: of the worker half.
            make_spec: builds the spec of a half.
            kv_caches: the device pool.
            clock: seconds, monotonic.
            hash_prompt: makes the hashes of a prompt's blocks, for operators' commands about a prefix.
        """
        specs = make_spec(replace(config, rank=None)), make_spec(config)
        scheduler = _open_scheduler(specs[0], clock, hash_prompt)
        # This engine pauses between the steps in which it waits; a pause in each step would delay the first token.
        halves = cls(scheduler, OffloadingConnectorWorker(specs[1], pause=lambda _: None), specs)
        try:
            halves.worker.register_kv_caches(kv_caches)
        except BaseException:
            halves.shutdown()
            raise
        return halves

    @property
    def manager(self) -> OffloadingManager:
        """The manager of the tiers."""
        return self.scheduler.manager

    def shutdown(self) -> None:
        """End worker, manager and tiers; idempotent."""
        self.worker.shutdown()
        self.scheduler.shutdown()
        for spec in reversed(self.specs):
            spec.shutdown()


def _open_scheduler(
    spec: OffloadingSpec, clock: Callable[[], float], hash_prompt: PromptHasher
) -> OffloadingConnectorScheduler:
    recorder = open_recorder(spec.config, clock=clock)
    control = open_control(spec.config, hash_prompt)
    try:
        scheduler = OffloadingConnectorScheduler(spec, recorder, clock, control)
    except BaseException:
        if recorder is not None:
            recorder.close()
        if control is not None:
            control.close()
        raise
    for line in describe_start(spec, "the embedded engine", control):
        logger.info("%s", line)
    return scheduler
