"""A package of somebody else's with a policy and a tier, written into a folder as pip would put it there."""

from pathlib import Path

PARTS = '''
"""An eviction policy and a secondary tier of somebody else's."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvtier import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies.base import CachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.namespace import make_namespace
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager, TierSettings


class Mine(LRUCachePolicy):
    """Evicts what was stored longest ago, used or not."""

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        pass


class Unfinished(CachePolicy):
    """No policy yet."""


class NeedsMore(LRUCachePolicy):
    def __init__(self, cache_capacity: int, more: int) -> None:
        super().__init__(cache_capacity)


class FolderTier(SecondaryTierManager):
    """Keeps each row in a file of a folder, for ever, without threads."""

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        root_dir: str,
        suffix: str = ".row",
        *,
        settings: TierSettings = TierSettings(),
    ) -> None:
        super().__init__(config, primary_kv_view, settings)
        self.rows = np.asarray(primary_kv_view)
        self.folder = Path(root_dir, make_namespace(config, self.rows.strides[0]).name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.suffix = suffix
        self.finished: list[JobResult] = []

    @staticmethod
    def get_tier_type() -> str:
        return "folder"

    def path(self, key: OffloadKey) -> Path:
        return self.folder / (key.hex() + self.suffix)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.path(key).exists()

    def submit_store(self, job: JobMetadata) -> None:
        for key, slot in zip(job.keys, job.block_ids, strict=True):
            self.path(key).write_bytes(self.rows[slot].tobytes())
        self.finished.append(JobResult(job.job_id, success=True))

    def submit_load(self, job: JobMetadata) -> None:
        for key, slot in zip(job.keys, job.block_ids, strict=True):
            self.rows[slot] = np.frombuffer(self.path(key).read_bytes(), dtype=np.int8)
        self.finished.append(JobResult(job.job_id, success=True))

    def get_finished(self) -> Iterable[JobResult]:
        finished, self.finished = self.finished, []
        return finished

    def reset(self, epoch: bytes) -> None:
        self.folder = self.folder.with_name(make_namespace(self.config, self.rows.strides[0], epoch).name)
        self.folder.mkdir(parents=True, exist_ok=True)


NUMBER = 7
'''


def write_package(folder: Path, name: str) -> None:
    """Write package ``name`` with its module ``parts`` into ``folder``."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(PARTS)
    (package / "broken.py").write_text("1 / 0\n")
    (package / "needy.py").write_text("import a_library_that_nobody_has\n")


def write_offers(folder: Path, distribution: str, offers: dict[str, dict[str, str]]) -> None:
    """Write the metadata of an installed distribution: group of entry points -> name -> target."""
    metadata = folder / f"{distribution}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = []
    for group, targets in offers.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in targets.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
