"""A trace becomes prompts that share exactly what its ids share, and a broken trace is one clear error."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.demo.trace import TraceRequest, TraceShape, make_prompt, plan_trace, read_trace
from kvtier.errors import ConfigError

LINE = {"timestamp": 3, "input_length": 1100, "output_length": 500, "hash_ids": [7, 8, 9]}
SHAPE = TraceShape(num_requests=40, scale_ratio=0.125, max_answer_tokens=16)


def write_trace(path: Path, *lines: object, compress: bool = True) -> Path:
    """Write JSON lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    return path


def request(*hash_ids: int, num_prompt_tokens: int | None = None, arrival_ms: float = 0.0) -> TraceRequest:
    """Return a request whose blocks are all full unless its length is given."""
    return TraceRequest(arrival_ms, num_prompt_tokens or 512 * len(hash_ids), 100, hash_ids)


@pytest.mark.parametrize("compress", [True, False])
def test_a_trace_is_read_with_gzip_and_without(tmp_path: Path, compress: bool) -> None:
    path = write_trace(tmp_path / "trace", LINE, LINE, compress=compress)

    assert read_trace(path, 40) == [TraceRequest(3.0, 1100, 500, (7, 8, 9))] * 2


def test_only_as_many_requests_are_read_as_asked_for(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", LINE, LINE, "what follows is never looked at")

    assert len(read_trace(path, 2)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "text",
        [1, 2],
        LINE | {"hash_ids": "7"},
        LINE | {"hash_ids": [7, "x"]},
        LINE | {"input_length": -1},
        LINE | {"timestamp": None},
        {"timestamp": 1},
    ],
)
def test_a_line_that_is_no_request_is_named_by_number(tmp_path: Path, line: object) -> None:
    path = write_trace(tmp_path / "trace", LINE, line)

    with pytest.raises(ConfigError, match=r"--trace.*line 2"):
        read_trace(path, 40)


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"{", b"\xff\xfe", gzip.compress(b"x" * 999, mtime=0)[:30], b"\x1f\x8bno"]
)
def test_a_file_that_is_no_trace_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"--trace"):
        read_trace(path, 40)


def test_a_missing_trace_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace.*cannot be read"):
        read_trace(tmp_path / "nowhere", 40)


@given(
    shared=st.lists(st.integers(0, 99), max_size=4),
    tails=st.tuples(st.integers(100, 199), st.integers(200, 299)),
    scale_ratio=st.sampled_from([1 / 64, 1 / 16, 0.1, 1.0]),
)
def test_prompts_share_exactly_the_blocks_whose_ids_they_share(
    shared: list[int], tails: tuple[int, int], scale_ratio: float
) -> None:
    one, other = (make_prompt(request(*shared, tail), 0, scale_ratio) for tail in tails)
    num_shared = round(512 * scale_ratio) * len(shared)

    assert one[:num_shared] == other[:num_shared]
    assert one[num_shared : num_shared + 8] != other[num_shared : num_shared + 8]


@given(st.integers(1, 3000), st.sampled_from([1 / 64, 1 / 16, 0.3, 1.0]))
def test_a_prompt_has_the_scaled_length_even_where_ids_are_missing(
    num_tokens: int, scale_ratio: float
) -> None:
    prompt = make_prompt(request(1, 2, num_prompt_tokens=num_tokens), 0, scale_ratio)

    assert len(prompt) == max(1, round(num_tokens * scale_ratio))


def test_content_without_an_id_is_shared_with_nobody() -> None:
    one, other = (make_prompt(request(1, num_prompt_tokens=600), index, 1.0) for index in (0, 1))

    assert one[:512] == other[:512]
    assert one[512:] != other[512:]


def test_a_partial_last_block_shares_the_part_it_has() -> None:
    partial, full = (
        make_prompt(request(1, 2, num_prompt_tokens=700), 0, 1.0),
        make_prompt(request(1, 2), 1, 1.0),
    )

    assert full.startswith(partial)


def test_requests_are_served_in_the_order_of_arrival_with_bounded_answers() -> None:
    turns = plan_trace([request(1, arrival_ms=9.0), request(2, 3, arrival_ms=1.0)], SHAPE)

    assert [len(turn.token_ids) for turn in turns] == [128, 64]
    assert [turn.num_answer_tokens for turn in turns] == [12, 12]
    assert [turn.label for turn in turns] == ["1", "2"]


@pytest.mark.parametrize("scale_ratio", [0.0, -1.0, 1.5, float("nan")])
def test_a_scale_outside_its_range_is_refused(scale_ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"--scale"):
        TraceShape(1, scale_ratio, 1)
