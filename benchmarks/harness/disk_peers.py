"""Other projects' tiers on a local disk as contestants, if they are installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.harness import lmcache_local, vllm_fs
from benchmarks.harness.disk_case import DiskCase
from benchmarks.harness.lmcache_local import LMCacheDisk
from benchmarks.harness.rounds import Contestant
from benchmarks.harness.tier_jobs import make_keys
from benchmarks.harness.vllm_fs import VLLMFSTier


@dataclass(frozen=True, slots=True)
class DiskPeers:
    """The contestants besides kvtier and the floor.

    Attributes:
        has_vllm: whether vLLM's fs tier is one.
        has_lmcache: whether LMCache's disk back end is one.
    """

    has_vllm: bool = False
    has_lmcache: bool = False

    def open(
        self, case: DiskCase, rows: memoryview, folder: Path, ends: ExitStack, *, is_direct: bool
    ) -> dict[str, Contestant]:
        """Return the peers by name, each with its own folder in ``folder``; ``ends`` closes them."""
        peers: dict[str, Contestant] = {}
        if self.has_vllm:
            vllm = VLLMFSTier(rows, folder / "vllm", is_direct=is_direct)
            ends.callback(vllm.close)
            peers[vllm_fs.NAME] = _with_new_keys(vllm, case)
        if self.has_lmcache:
            lmcache = LMCacheDisk(rows, folder / "lmcache", is_direct=is_direct)
            ends.callback(lmcache.close)
            peers[lmcache_local.DISK_NAME] = _with_new_keys(lmcache, case)
        return peers


def find_disk_peers(note: Callable[[str], None]) -> DiskPeers:
    """Return the installed peers; call ``note`` with a line for each that is not installed."""
    obstacles: list[str | None] = [
        None if vllm_fs.can_import() else vllm_fs.MISSING,
        lmcache_local.find_obstacle(),
    ]
    for obstacle in obstacles:
        if obstacle is not None:
            note(obstacle)
    return DiskPeers(*(obstacle is None for obstacle in obstacles))


def _with_new_keys(peer: VLLMFSTier | LMCacheDisk, case: DiskCase) -> Contestant:
    generations: Iterator[int] = count()
    return lambda: peer.run(make_keys(case.num_blocks, next(generations)), case.num_jobs)
