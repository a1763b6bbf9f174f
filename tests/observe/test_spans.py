"""A request's span says which tiers served it, how long it waited for them, and why the rest was computed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry's SDK: pip install opentelemetry-sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.small_engine import prompt_of, running_engine

from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord
from kvtier.observe.spans import MAX_HEADERS, SPAN_NAME, RequestSpans, attributes_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}

RECORD = RequestRecord(
    req_id="r1",
    began_s=1000.5,
    num_prompt_tokens=100,
    tokens_by_origin={"device": 16, "host": 32, "fs": 16},
    missed=(
        MissedRun(64, 4, Miss(MissCause.GROUP_SHORT)),
        MissedRun(68, 28, Miss(MissCause.EVICTED, "fs")),
        MissedRun(96, 4, Miss(MissCause.PARTIAL_BLOCK)),
    ),
    waited_s=0.25,
)


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Set up OpenTelemetry, which can be done once in a process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[RequestSpans]:
    exporter.clear()
    yield RequestSpans(block_tokens=16)
    exporter.clear()


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    """Return the one span that was made."""
    (span,) = exporter.get_finished_spans()
    return span


def test_a_span_has_tiers_blocks_latency_and_the_largest_cause(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    spans.record(RECORD)

    span = only(exporter)
    assert span.name == SPAN_NAME
    assert dict(span.attributes or {}) == {
        "kv_cache.request_id": "r1",
        "kv_cache.tier_hit": ("device", "host", "fs"),
        "kv_cache.blocks_hit": 4,
        "kv_cache.blocks_hit.device": 1,
        "kv_cache.blocks_hit.host": 2,
        "kv_cache.blocks_hit.fs": 1,
        "kv_cache.blocks_missed": 2,
        "kv_cache.promotion_latency_seconds": 0.25,
        "kv_cache.miss_cause": "evicted",
        "kv_cache.miss_tier": "fs",
    }


def test_a_span_lasts_from_the_first_search_to_the_begin_of_computing(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    spans.record(RECORD)

    span = only(exporter)
    assert (span.start_time, span.end_time) == (1_000_250_000_000, 1_000_500_000_000)


def test_a_request_without_hits_or_misses_says_so() -> None:
    empty = attributes_of(RequestRecord("r", 0.0, 0), 16)
    whole = attributes_of(RequestRecord("r", 0.0, 32, {"host": 32}), 16)

    assert (empty["kv_cache.tier_hit"], empty["kv_cache.blocks_hit"]) == (("none",), 0)
    assert (whole["kv_cache.blocks_missed"], "kv_cache.miss_cause" in whole) == (0, False)


def test_the_parent_is_named_by_the_trace_headers_of_the_request(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    spans.note_request("r1", HEADERS)
    spans.record(RECORD)

    parent = only(exporter).parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE_ID, PARENT_ID)


def test_headers_are_forgotten_with_the_request_and_serve_one_span(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    spans.note_request("r1", HEADERS)
    spans.forget("r1")
    spans.record(RECORD)
    spans.note_request("r1", HEADERS)
    spans.record(RECORD)
    spans.record(RECORD)

    assert [span.parent is not None for span in exporter.get_finished_spans()] == [False, True, False]


def test_headers_of_too_many_requests_are_not_kept(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    for number in range(MAX_HEADERS):
        spans.note_request(f"other {number}", HEADERS)
    spans.note_request("r1", HEADERS)
    spans.record(RECORD)

    assert only(exporter).parent is None


def test_without_headers_the_parent_is_the_current_span(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    with trace.get_tracer("application").start_as_current_span("question") as question:
        spans.record(RECORD)

    made = {span.name: span for span in exporter.get_finished_spans()}
    parent = made[SPAN_NAME].parent
    assert parent is not None
    assert parent.span_id == question.get_span_context().span_id


def test_each_new_record_has_one_span_and_what_is_no_longer_kept_has_none(
    spans: RequestSpans, exporter: InMemorySpanExporter
) -> None:
    records = [RequestRecord(f"r{number}", 0.0, 16) for number in range(5)]
    spans.export(records[:2], 2)
    spans.export(records[:2], 2)
    spans.export(records[3:], 5)

    named = [(span.attributes or {})["kv_cache.request_id"] for span in exporter.get_finished_spans()]
    assert named == ["r0", "r1", "r3", "r4"]


def test_what_was_recorded_before_the_spans_began_has_none(exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    spans = RequestSpans(16, num_earlier=2)
    spans.export([RequestRecord(f"r{number}", 0.0, 16) for number in range(3)], 3)

    assert (only(exporter).attributes or {})["kv_cache.request_id"] == "r2"


@pytest.mark.parametrize("is_imported", [False, True])
def test_nothing_is_imported_or_made_before_opentelemetry_is_set_up(is_imported: bool) -> None:
    program = """
import sys
if {is_imported}:
    import opentelemetry.trace
from kvtier.misses import RequestRecord
from kvtier.observe.spans import RequestSpans
spans = RequestSpans(16)
spans.note_request("r", {{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}})
spans.export([RequestRecord("r", 0.0, 16)], 1)
spans.record(RequestRecord("r", 0.0, 16))
assert not spans.is_active
print("opentelemetry" in sys.modules, "opentelemetry.sdk" in sys.modules)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program.format(is_imported=is_imported)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.stdout.split() == [str(is_imported), "False"], answer.stderr


def test_the_embedded_engine_makes_a_span_of_each_request_when_it_has_ended(
    spans: RequestSpans, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    assert spans.is_active
    with running_engine(tmp_path) as engine:
        engine.run(prompt_of(1), 2)
        engine.drop_device_cache()
        engine.run(prompt_of(1), 2)

    first, second = (span.attributes or {} for span in exporter.get_finished_spans())
    assert first["kv_cache.tier_hit"] == ("none",)
    assert second["kv_cache.tier_hit"] == ("host",)
    assert second["kv_cache.blocks_hit"] == 4
