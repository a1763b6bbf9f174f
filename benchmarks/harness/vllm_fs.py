"""vLLM's fs tier, driven with the same jobs as kvtier's, if vLLM is installed."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness.block_files import empty_files
from benchmarks.harness.tier_jobs import job_numbers, rates_of
from kvtier.base import OffloadKey

NAME = "vllm fs"
TIERING = "vllm.v1.kv_offload.tiering"
MISSING = "vLLM is not installed, so its fs tier was not measured: make bench-peers"

VLLM = Any  # Any: modules and objects of a package that may be missing


class VLLMFSTier:
    """vLLM's fs tier with its default number of threads: only rows, one file per block.

    Args:
        rows: shape (num_blocks, block_bytes).
        folder: the folder of its files.
        is_direct: whether it may bypass the page cache; by default it does so wherever possible.
    """

    def __init__(self, rows: memoryview, folder: Path, *, is_direct: bool) -> None:
        base: VLLM = importlib.import_module(f"{TIERING}.base")
        manager: VLLM = importlib.import_module(f"{TIERING}.fs.manager")
        self._folder = folder
        self._make_job: VLLM = base.TransferJob
        # What the tier reads from vLLM's spec: names for its folders, and sizes of parallel groups.
        group = SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",))
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        )
        config = SimpleNamespace(
            groups=[group],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="float16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self._tier: VLLM = manager.FileSystemTierManager(spec, rows, "fs", str(folder))
        if not is_direct:
            self._tier._use_o_direct = False  # noqa: SLF001  # 2026-11, vLLM 0.32: it has no setting for it
        self._num_bytes = rows.nbytes

    def run(self, keys: Sequence[OffloadKey], num_jobs: int) -> Mapping[str, float]:
        """Store and load every block once, and return the rates, MiB/s; keeps folders and truncated files."""
        rates = rates_of(
            self._num_bytes,
            lambda: self._move(keys, num_jobs, is_promotion=False),
            lambda: self._move(keys, num_jobs, is_promotion=True),
        )
        empty_files(self._folder.rglob("*.bin"))
        return rates

    def close(self) -> None:
        """Shut down its threads; its files stay."""
        self._tier.shutdown()

    def _move(self, keys: Sequence[OffloadKey], num_jobs: int, *, is_promotion: bool) -> None:
        """Submit all jobs at once and wait for them; all must succeed."""
        submit = self._tier.submit_load if is_promotion else self._tier.submit_store
        for job_number, numbers in enumerate(job_numbers(len(keys), num_jobs)):
            job_keys = [keys[number] for number in numbers]
            submit(
                self._make_job(job_number, job_keys, np.array(numbers, dtype=np.int64), is_promotion, None)
            )
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        assert len(results) == num_jobs
        assert all(result.success for result in results)


def can_import() -> bool:
    """Return whether vLLM's fs tier is installed."""
    try:
        importlib.import_module(f"{TIERING}.fs.manager")
    except ImportError:
        return False
    return True
