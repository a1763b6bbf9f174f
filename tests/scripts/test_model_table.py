"""The page of models by engine: its rows say what differs, the bar has two sides, and an engine's error has a row."""

from dataclasses import replace

from scripts.model_table import (
    COMPUTED,
    DEVICE,
    FS,
    HOST,
    Row,
    bytes_cells,
    first_token_cells,
    gain_cells,
    make_page,
)

TIMES = {COMPUTED: [0.3, 0.1, 0.2], DEVICE: [0.010], HOST: [0.025], FS: [0.05]}
HYBRID = Row(
    "mix",
    "vllm",
    2000,
    token_bytes=1024.0,
    state_bytes=2048,
    interval_tokens=512,
    found_tokens=1536,
    moved_bytes=1536 * 1024 + 2048,
    copy_s=0.002,
    times_s=TIMES,
    equal=dict.fromkeys(TIMES, True),
)
DENSE = replace(HYBRID, model="plain", state_bytes=0, interval_tokens=0)


def test_a_row_has_medians_of_each_origin_in_milliseconds() -> None:
    assert first_token_cells(HYBRID) == [
        "mix",
        "vllm",
        "2,000",
        "1,536",
        "all",
        "200.0",
        "10.0",
        "25.0",
        "50.0",
    ]
    assert HYBRID.is_good


def test_a_row_names_other_tokens_and_other_places() -> None:
    row = replace(HYBRID, equal={**HYBRID.equal, FS: False}, problems=("fs: found {}, not {'fs': 1536}",))

    assert first_token_cells(row)[4] == "**not** fs; fs: found {}, not {'fs': 1536}"
    assert not row.is_good
    assert not replace(HYBRID, problems=("x",)).is_good
    assert not replace(HYBRID, equal={HOST: False}).is_good


def test_hits_that_equal_the_engines_own_and_not_the_computed_answer_are_told_apart() -> None:
    assert first_token_cells(replace(HYBRID, is_exact=False))[4] == "computed; hits as the engine's own"


def test_a_host_hit_is_held_against_a_device_hit_copies_and_ten_milliseconds() -> None:
    missed = gain_cells(HYBRID)  # 25 ms against 10 + 1.5 * 2 + 10
    met = gain_cells(replace(HYBRID, copy_s=0.004))

    assert missed[3:] == ["8.0", "4.0", "25.0", "23.0", "1,574,912", "2.00", "**no**"]
    assert met[6] == "26.0"
    assert met[-1] == "yes"


def test_bytes_of_a_state_and_its_interval_are_empty_without_one() -> None:
    assert bytes_cells(HYBRID) == ["mix", "vllm", "1,024", "2,048", "512"]
    assert bytes_cells(DENSE) == ["plain", "vllm", "1,024", "", ""]


def test_the_page_has_gains_of_hybrids_alone_and_the_error_of_what_did_not_run() -> None:
    failed = Row("bad", "vllm", 2000, reason="no such | model\nat all")

    page = make_page([HYBRID, DENSE, failed], {"cores": 2}, 3, "python -m it")

    gains = page.partition("## What a hybrid gains")[2]
    assert "| mix |" in gains
    assert "| plain |" not in gains
    assert "| bad | vllm | `no such \\| model at all` |" in page
    assert "`python -m it`" in page
    assert page.endswith("| machine | |\n|---|---|\n| cores | 2 |\n")
    assert page.count("| mix | vllm |") == 3
