"""The page about a hybrid's first token has a row for each length and origin."""

from benchmarks.vllm.first_token import DEVICE, FS, HOST
from benchmarks.vllm.hybrid import COMPUTED, NAMES, make_page


def test_the_page_has_each_length_and_origin_with_its_share_of_computing() -> None:
    times = {2000: {COMPUTED: [0.4, 0.5, 0.6], DEVICE: [0.1], HOST: [0.2, 0.2], FS: [0.25]}}

    page = make_page(times, {"cores": 2})

    rows = [line for line in page.splitlines() if line.startswith("| 2,000")]
    assert [row.split(" | ")[1] for row in rows] == list(NAMES.values())
    assert rows[0] == "| 2,000 | computed | 500.0 | 400.0 to 600.0 | 1.00 |"
    assert rows[2] == "| 2,000 | host memory | 200.0 | 200.0 to 200.0 | 0.40 |"
    assert page.endswith("| machine | |\n|---|---|\n| cores | 2 |\n")
