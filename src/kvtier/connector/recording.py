"""Recording the requests of an engine: what a recorder is, and the feature that calls it."""

from collections.abc import Collection, Sequence
from typing import Protocol

from kvtier.connector.common import StopReason
from kvtier.connector.features import RequestFeature
from kvtier.connector.request_records import RequestRecords
from kvtier.connector.request_state import RequestState
from kvtier.misses import RequestRecord


class RequestRecorder(Protocol):
    """Records the requests that an engine serves. Its methods are called on the scheduler's thread."""

    def on_arrival(self, req_id: str) -> None:
        """Record the arrival of a request, unless it is recorded already."""

    def on_end(
        self,
        req_id: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        keys: Sequence[bytes],
        stop: StopReason = StopReason.UNKNOWN,
        record: RequestRecord | None = None,
    ) -> None:
        """Record a request that has ended, successfully or not.

        Args:
            req_id: its name; one that never came is not recorded.
            num_prompt_tokens: length of its prompt.
            num_output_tokens: length of its answer, as far as it got.
            keys: the names of its full blocks, head first.
            stop: why its answer ended.
            record: where its prompt came from; None when it was never computed.
        """

    def forget(self, req_id: str) -> None:
        """Forget a request without recording it."""

    def stats(self) -> dict[str, float]:
        """Return the counts of recorded and dropped requests by dotted name."""

    def close(self) -> None:
        """Write the queued requests and close the file; idempotent."""


class Recording(RequestFeature):
    """Has a recorder record each request of traffic that ends, and closes it. Used from the scheduler's thread.

    Args:
        recorder: writes them.
        records: where the prompts came from; behind this feature in their order, so that they still know.
    """

    def __init__(self, recorder: RequestRecorder, records: RequestRecords) -> None:
        self._recorder = recorder
        self._records = records

    def on_arrived(self, state: RequestState) -> None:
        self._recorder.on_arrival(state.context.req_id)

    def on_finished(self, state: RequestState, stop: StopReason, is_traffic: bool) -> None:
        if is_traffic:
            self._record(state, stop)
        else:
            self._recorder.forget(state.context.req_id)

    def on_dropped(self, req_id: str) -> None:
        self._recorder.forget(req_id)

    def stats(self) -> dict[str, float]:
        return self._recorder.stats()

    def close(self, unfinished: Collection[RequestState]) -> None:
        for state in unfinished:
            self._record(state, StopReason.UNKNOWN)
        self._recorder.close()

    def _record(self, state: RequestState, stop: StopReason) -> None:
        """Record a request under the blocks of its first KV group; their content is that of the others'."""
        request = state.request
        num_output_tokens = request.num_tokens - request.num_prompt_tokens
        self._recorder.on_end(
            request.request_id,
            request.num_prompt_tokens,
            num_output_tokens,
            state.keys[0],
            stop,
            self._records.record_of(state),
        )
