"""The same answers and bytes as SGLang's own backend of files, over random walks; longer ones by ``walk``."""

from pathlib import Path

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from tests.engines.sglang.walk import Walk, open_pair

QUICK_PAGES = 3000


@pytest.mark.parametrize(
    ("layout", "has_slots"),
    [("page_first", True), ("page_first", False), ("layer_first", True), ("layer_first", False)],
)
def test_a_random_walk_gets_the_answers_of_sglangs_own_backend(
    layout: str, has_slots: bool, tmp_path: Path
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "256MiB"}
    backend, oracle, pools = open_pair(tmp_path, tier, layout=layout, has_slots=has_slots)
    counts = Walk(backend, oracle, pools, 1, has_slots=has_slots).run(QUICK_PAGES)
    backend.close()
    assert counts.num_hits > QUICK_PAGES / 20, "a walk without hits proves nothing"
