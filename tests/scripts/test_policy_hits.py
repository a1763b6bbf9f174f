"""``policy_hits`` prints a table of what policies find, and says in one line why it cannot."""

import json
from pathlib import Path

import pytest

from scripts.policy_hits import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests of two blocks, the second one for the blocks of the first."""
    path = tmp_path / "trace.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]})
    path.write_text(f"{line}\n{line}\n")
    return path


def test_a_table_has_a_row_for_each_policy_and_the_bound(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(trace), "--percent", "100", "150", "--policy", "lru", "arc"])

    assert capsys.readouterr().out.splitlines() == [
        "| policy | 100 | 150 |",
        "|---| ---:| ---:|",
        "| lru | 50.00 | 50.00 |",
        "| arc | 50.00 | 50.00 |",
        "| Belady | 50.00 | 50.00 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--percent", "5", "0"], "argument --percent: '0': a capacity must be a number above zero"),
        (["--percent", "inf"], "argument --percent: 'inf'"),
        (["--percent", "many"], "argument --percent: 'many'"),
        (["--policy", "lur"], "argument --policy: unknown eviction policy 'lur': did you mean 'lru'"),
        (
            ["--chunk-blocks", "0"],
            "argument --chunk-blocks: '0': a chunk must be an integer number of blocks",
        ),
        (["--chunk-blocks", "x"], "argument --chunk-blocks: 'x'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(trace), *arguments])

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: check the path"),
        ("", "the trace is empty"),
        ("{", "not JSON"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}',
            "no prompt has a full block of 512 tokens",
        ),
    ],
)
def test_a_trace_that_has_nothing_to_count_is_refused(
    trace: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.unlink() if content is None else trace.write_text(content)

    with pytest.raises(SystemExit, match="2"):
        main([str(trace)])

    assert message in capsys.readouterr().err
