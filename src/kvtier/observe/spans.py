"""OpenTelemetry spans that say where the prompt of each request came from.

One span a request, from its first search to the moment when the engine begins to compute it. Its parent is the span
that the request's trace headers name, otherwise the one that is current when the span is made. Spans are made only
where the process has set up a tracer provider; until then nothing of OpenTelemetry is imported and nothing is kept.

Source: the names of the attributes are those asked for in vLLM's issue 53926.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvtier.misses import MissedRun, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

SPAN_NAME = "kv_cache.lookup"

NOT_HIT = ("none",)
"""The tiers of a request that found nothing."""

MAX_HEADERS = 65_536
"""Requests whose trace headers wait for the record; beyond it a span has no parent. An engine has far fewer."""

NANOS = 1_000_000_000
"""OpenTelemetry counts time in nanoseconds."""

AttributeValue = str | int | float | tuple[str, ...]


class RequestSpans:
    """Makes the spans of one engine. Used from the scheduler's thread.

    Args:
        block_tokens: tokens in a block, which counts of blocks are made of.
        num_earlier: records that were made before, which have no span.
    """

    def __init__(self, block_tokens: int, num_earlier: int = 0) -> None:
        self._block_tokens = block_tokens
        self._headers: dict[str, Mapping[str, str]] = {}
        self._num_exported = num_earlier

    @property
    def is_active(self) -> bool:
        """Whether this process has set up OpenTelemetry; callers need not do anything until it has."""
        if "opentelemetry.trace" not in sys.modules:
            return False
        from opentelemetry import trace

        return not isinstance(
            trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider
        )

    def note_request(self, req_id: str, trace_headers: Mapping[str, str] | None) -> None:
        """Remember a request's trace headers until its record comes or it is forgotten."""
        if trace_headers and len(self._headers) < MAX_HEADERS and self.is_active:
            self._headers[req_id] = trace_headers

    def forget(self, req_id: str) -> None:
        """Forget a request of which no record will come."""
        self._headers.pop(req_id, None)

    def export(self, latest: Sequence[RequestRecord], num_records: int) -> None:
        """Make the spans of the records that are new since the last call.

        Args:
            latest: the latest records, oldest first; older ones may be missing, and then have no span.
            num_records: records since the start, those of ``latest`` included.
        """
        num_new = min(num_records - self._num_exported, len(latest))
        self._num_exported = num_records
        if num_new > 0 and self.is_active:
            for record in islice(latest, len(latest) - num_new, None):
                self.record(record)

    def record(self, record: RequestRecord) -> None:
        """Make the span of one request; without a tracer provider nothing happens."""
        headers = self._headers.pop(record.req_id, None)
        if not self.is_active:
            return
        end_ns = int(record.began_s * NANOS)
        span = _tracer().start_span(
            SPAN_NAME,
            context=None if headers is None else _context_of(headers),
            start_time=end_ns - int(record.waited_s * NANOS),
            attributes=attributes_of(record, self._block_tokens),
        )
        span.end(end_time=end_ns)


def attributes_of(record: RequestRecord, block_tokens: int) -> dict[str, AttributeValue]:
    """Return a span's attributes for where a prompt came from. Pure.

    Tokens that are no whole block, at the end of a prompt, are neither a block that was hit nor one that was missed.

    Args:
        record: the request.
        block_tokens: tokens in a block.
    """
    origins = record.tokens_by_origin
    num_hit = sum(origins.values()) // block_tokens
    attributes: dict[str, AttributeValue] = {
        "kv_cache.request_id": record.req_id,
        "kv_cache.tier_hit": tuple(origin for origin, tokens in origins.items() if tokens) or NOT_HIT,
        "kv_cache.blocks_hit": num_hit,
        "kv_cache.blocks_missed": max(0, record.num_prompt_tokens // block_tokens - num_hit),
        "kv_cache.promotion_latency_seconds": record.waited_s,
    }
    for origin, tokens in origins.items():
        if tokens:
            attributes[f"kv_cache.blocks_hit.{origin}"] = tokens // block_tokens
    cause = _largest(record.missed)
    if cause is not None:
        attributes["kv_cache.miss_cause"] = cause.miss.cause.value
        if cause.miss.tier:
            attributes["kv_cache.miss_tier"] = cause.miss.tier
    return attributes


def _largest(missed: Iterable[MissedRun]) -> MissedRun | None:
    """Return the run with the most tokens, the first of several; None when nothing was missed."""
    return max(missed, key=lambda run: run.num_tokens, default=None)


def _tracer() -> "Tracer":
    from opentelemetry import trace

    return trace.get_tracer("kvtier")


def _context_of(headers: Mapping[str, str]) -> "Context":
    """Return the context that a request's trace headers name."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
