"""What two commits see of each other's blocks is shared, left alone, or a failure."""

import pytest

from scripts.format_compatibility import NUM_BLOCKS, ROOT, Seen, judge, run

WHOLE, NONE = Seen(NUM_BLOCKS, NUM_BLOCKS, 0), Seen(0, 0, 0)


@pytest.mark.parametrize(
    ("seen", "again", "verdict"),
    [
        (WHOLE, WHOLE, "shared"),
        (NONE, WHOLE, "not shared, left alone"),
        (NONE, NONE, ""),
        (Seen(NUM_BLOCKS, NUM_BLOCKS - 1, 1), WHOLE, ""),
        (Seen(NUM_BLOCKS, 0, 0), WHOLE, ""),
        (Seen(3, 3, 0), WHOLE, ""),
        (WHOLE, Seen(NUM_BLOCKS - 1, NUM_BLOCKS - 1, 0), ""),
    ],
)
def test_a_format_is_shared_or_left_alone(seen: Seen, again: Seen, verdict: str) -> None:
    assert judge(WHOLE, seen, again) == verdict


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["fs", "slab"])
def test_a_commit_reads_what_it_has_stored_itself(
    tier: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("format") / "place"
    assert judge(*(run(ROOT / "src", tier, place, task) for task in ("store", "look", "look"))) == "shared"
