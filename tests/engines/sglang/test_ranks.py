"""One process for each rank on one directory: each finds its own part, and latents are there once for all."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from tests.engines.sglang import rank_process
from tests.engines.sglang.conftest import MakeConfig, key_of
from tests.tiering.fs.slots import stored_blocks

pytestmark = pytest.mark.slow

KEYS = [key_of(number) for number in range(12)]
GUARD_S = 120.0
NUM_RANKS = 2


class Ranks:
    """The processes of an engine's ranks, which work at the same time."""

    def __init__(self, processes: list[ProcessPoolExecutor]) -> None:
        self._processes = processes

    def open(self, make_config: MakeConfig, *, has_heads: bool) -> None:
        """Open the backend of each rank."""
        for rank, process in enumerate(self._processes):
            config = make_config(tp_rank=rank, tp_size=NUM_RANKS, is_mla_model=not has_heads)
            process.submit(rank_process.open_backend, asdict(config), has_heads=has_heads).result(GUARD_S)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in each process at once and return what each has answered; a list has one for each rank."""
        calls = [
            process.submit(function, *(one[rank] if isinstance(one, tuple) else one for one in arguments))
            for rank, process in enumerate(self._processes)
        ]
        return [call.result(GUARD_S) for call in calls]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ProcessPoolExecutor]]:
    """Two processes that start as SGLang's do: anew, not as forks."""
    context = multiprocessing.get_context("spawn")
    found = [ProcessPoolExecutor(1, mp_context=context) for _ in range(NUM_RANKS)]
    yield found
    for process in found:
        process.shutdown()


@pytest.fixture
def ranks(processes: list[ProcessPoolExecutor]) -> Iterator[Ranks]:
    """The processes, whose backends are closed at the end."""
    found = Ranks(processes)
    yield found
    found.call(rank_process.close)


def test_ranks_with_heads_have_parts_of_their_own(ranks: Ranks, make_config: MakeConfig) -> None:
    ranks.open(make_config, has_heads=True)
    stored = ranks.call(rank_process.store, KEYS[:8], (1, 2))
    assert [answers for answers, _ in stored] == [[True] * 8] * NUM_RANKS
    assert stored[0][1] != stored[1][1]
    loaded = ranks.call(rank_process.load, KEYS)
    for (num_found, came), (_, digests) in zip(loaded, stored, strict=True):
        assert num_found == 8
        assert came == [*digests, None, None, None, None]


def test_ranks_with_latents_share_the_writers_copy(
    ranks: Ranks, make_config: MakeConfig, tmp_path: Path
) -> None:
    ranks.open(make_config, has_heads=False)
    (answers, digests), (others, _) = ranks.call(rank_process.store, KEYS[:8], (1, 2))
    assert answers == others == [True] * 8
    assert ranks.call(rank_process.load, KEYS[:8]) == [(8, digests)] * NUM_RANKS
    names = [block.name.hex() for block in stored_blocks(tmp_path / "kv")]
    assert len([name for name in names if any(key[:20] in name for key in KEYS)]) == 8


def test_a_rank_that_clears_leaves_the_others_part(ranks: Ranks, make_config: MakeConfig) -> None:
    ranks.open(make_config, has_heads=True)
    stored = ranks.call(rank_process.store, KEYS[:4], (3, 4))
    first, second = ranks._processes
    assert first.submit(rank_process.clear).result(GUARD_S)
    assert first.submit(rank_process.load, KEYS[:4]).result(GUARD_S) == (0, [None] * 4)
    assert second.submit(rank_process.load, KEYS[:4]).result(GUARD_S) == (4, stored[1][1])
