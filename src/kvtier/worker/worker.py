"""Routes transfers to handlers by the media they copy between.

It moves no byte itself. A handler that raises or declines costs its own job: the caller gets False and
treats the job as failed.

Source: vLLM's ``kv_offload/worker``, pull request 37874.
"""

import logging
from collections.abc import Mapping

from kvtier.base import (
    LoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
    overrides,
)
from kvtier.errors import DuplicateNameError

__all__ = [
    "OffloadingHandler",
    "OffloadingWorker",
    "TransferJobId",
    "TransferResult",
    "TransferSpec",
    "TransferType",
]

logger = logging.getLogger(__name__)


class OffloadingWorker:
    """The handlers of one worker, one for each pair of media. Used from one thread."""

    def __init__(self) -> None:
        self._handlers: dict[TransferType, OffloadingHandler] = {}
        self._joining: set[TransferType] = set()

    def register_handler(
        self, src_cls: type[LoadStoreSpec], dst_cls: type[LoadStoreSpec], handler: OffloadingHandler
    ) -> None:
        """Use ``handler`` for transfers from ``src_cls``'s medium to ``dst_cls``'s.

        Raises:
            DuplicateNameError: that pair of media has a handler.
        """
        transfer_type = TransferType(src_cls.medium(), dst_cls.medium())
        if transfer_type in self._handlers:
            raise DuplicateNameError("transfer handler", "_to_".join(transfer_type))
        self._handlers[transfer_type] = handler
        if overrides(handler.transfer_joined, OffloadingHandler.transfer_joined):
            self._joining.add(transfer_type)

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        """Start a transfer.

        Returns:
            False when no handler took it, and then the job is never reported by get_finished.
        """
        handler = self._handlers.get(_media(spec))
        if handler is None:
            logger.error("job %d: no handler copies %s to %s", job_id, *_media(spec))
            return False
        try:
            return handler.transfer_async(job_id, TransferSpec(*spec))
        except Exception:  # a foreign handler may raise anything; its job fails, the engine goes on
            logger.exception("job %d: the handler for %s to %s failed to start it", job_id, *_media(spec))
            return False

    def transfer_joined(self, jobs: Mapping[TransferJobId, TransferSpec]) -> set[TransferJobId]:
        """Start transfers, with few calls where their handler can join them.

        Returns:
            Those that a handler took; the others are never reported by get_finished.
        """
        by_media: dict[TransferType, dict[TransferJobId, TransferSpec]] = {}
        for job_id, spec in jobs.items():
            by_media.setdefault(_media(spec), {})[job_id] = spec
        started: set[TransferJobId] = set()
        for media, of_media in by_media.items():
            handler = self._handlers.get(media)
            if handler is None or len(of_media) == 1 or media not in self._joining:
                started.update(
                    job_id for job_id, spec in of_media.items() if self.transfer_async(job_id, spec)
                )
                continue
            try:
                started |= handler.transfer_joined(of_media)
            except Exception:  # a foreign handler may raise anything; its jobs fail, the engine goes on
                logger.exception(
                    "jobs %s: the handler for %s to %s failed to start them", list(of_media), *media
                )
        return started

    def get_finished(self) -> list[TransferResult]:
        """Return what every handler has finished since the last call."""
        return [result for handler in self._handlers.values() for result in handler.get_finished()]

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has ended; a handler ignores ids that are not its own."""
        for handler in self._handlers.values():
            handler.wait(job_ids)

    def shutdown(self) -> None:
        """End every handler; idempotent."""
        for handler in self._handlers.values():
            handler.shutdown()


def _media(spec: TransferSpec) -> TransferType:
    source, destination = spec
    return TransferType(source.medium(), destination.medium())
