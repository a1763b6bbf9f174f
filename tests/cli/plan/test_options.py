"""Options of ``kvtier plan`` become a request, or are refused with what was expected."""

from pathlib import Path

import pytest

from kvtier.cli.plan.options import ModelOptions, make_goal, parse_seconds
from kvtier.errors import ConfigError
from kvtier.planning.tier_mix import Goal


def model(
    config: Path | None = None,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    kv_dtype: str | None = None,
    kv_bytes: str | None = None,
    dtype: str | None = None,
    name: str | None = None,
    state_bytes: str | None = None,
    tp: int = 1,
) -> ModelOptions:
    sizes = (kv_bytes, state_bytes, None, tp)
    return ModelOptions(name, config, layers, kv_heads, head_size, dtype, kv_dtype, *sizes)


def test_a_model_is_described_by_its_dimensions_or_by_the_bytes_of_a_token() -> None:
    assert model(layers=32, kv_heads=8, head_size=128).shape().bytes_per_token == 128 * 1024
    assert model(layers=32, kv_heads=8, head_size=128, kv_dtype="fp8").shape().bytes_per_token == 64 * 1024
    assert model(layers=32, kv_heads=8, head_size=128, dtype="float32").shape().bytes_per_token == 256 * 1024
    assert model(name="Llama-3.1-8B").shape().bytes_per_token == 128 * 1024
    assert model(name="Llama-3.1-8B", kv_dtype="fp8").shape().bytes_per_token == 64 * 1024
    assert model(kv_bytes="96KiB").shape().bytes_per_token == 96 * 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (model(), "describe the model by one of"),
        (model(kv_bytes="1KiB", name="Llama-3.1-8B"), "describe the model by one of"),
        (model(kv_bytes="1KiB", layers=3), "describe the model by one of"),
        (model(config=Path("config.json"), kv_bytes="1KiB"), "describe the model by one of"),
        (model(layers=3, kv_heads=2), "--head-size: is missing"),
        (model(kv_bytes="1KiB", dtype="fp8"), "--dtype='fp8': goes with --layers"),
        (model(layers=3, kv_heads=8, head_size=4, tp=3), "--tp=3: must divide 8 KV heads"),
        (model(layers=3, kv_heads=8, head_size=4, tp=0), "--tp=0: must divide 8 KV heads"),
        (model(kv_bytes="1KiB", tp=2), "--tp=2: goes with a model whose KV heads are known"),
        (model(tp=2), "describe the model by one of"),
        (model(kv_bytes="much"), "--kv-bytes-per-token='much'"),
        (model(layers=3, kv_heads=2, head_size=4, dtype="fp3"), "--dtype='fp3': must be one of"),
        (model(layers=3, kv_heads=2, head_size=4, kv_dtype="fp3"), "--kv-dtype='fp3': must be one of"),
    ],
)
def test_a_model_described_twice_or_by_half_is_refused(options: ModelOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.shape()


@pytest.mark.parametrize(
    ("num_workers", "state_bytes", "copies", "said"),
    [
        (1, None, 1, ()),
        (2, None, 1, ("what several of 2 workers hold is stored once, as under vLLM",)),
        (8, None, 1, ("what several of 8 workers hold is stored once, as under vLLM",)),
        (8, "1MiB", 4, ("each of 8 workers stores the KV heads that it holds, copies included",)),
    ],
)
def test_what_workers_hold_alike_counts_once_but_beside_states(
    num_workers: int, state_bytes: str | None, copies: int, said: tuple[str, ...]
) -> None:
    shape = model(layers=4, kv_heads=2, head_size=64, state_bytes=state_bytes, tp=num_workers).shape()

    assert shape.attention_bytes_per_token == copies * 4 * 2 * 2 * 64 * 2
    assert shape.assumptions == said


@pytest.mark.parametrize(
    ("text", "time_s"), [("2s", 2.0), ("500ms", 0.5), ("1.5", 1.5), (" 3 s ", 3.0), ("4us", 4e-6)]
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, time_s: float) -> None:
    assert parse_seconds("--ttft-p90", text) == time_s


@pytest.mark.parametrize("text", ["", "2m", "-1s", "s", "1e3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ttft-p90"):
        parse_seconds("--ttft-p90", text)


def test_a_goal_is_one_of_hits_one_of_seconds_both_or_none() -> None:
    assert make_goal(None, None) is None
    assert make_goal(0.3, None) == Goal(hit_ratio=0.3)
    assert make_goal(None, "2s") == Goal(first_token_p90_s=2.0)
    assert make_goal(0.3, "2s") == Goal(0.3, 2.0)
