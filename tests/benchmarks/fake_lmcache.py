"""What the benchmarks use of LMCache, in a few lines, with faults to choose.

It keeps LMCache's promises about memory objects: each belongs to whom it was handed out until it is let go, and one
that is held by a back end lives on.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

BACKENDS = "lmcache.v1.storage_backend"


class Key(NamedTuple):
    """A key, as LMCache makes it."""

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int
    dtype: torch.dtype


class Block:
    """A memory object of zeros."""

    def __init__(self, owner: "FakeLMCache", shape: torch.Size, dtype: torch.dtype) -> None:
        self._owner = owner
        self._num_holders = 1
        self.tensor = torch.zeros(shape, dtype=dtype)
        owner.num_live += 1

    @property
    def raw_tensor(self) -> torch.Tensor:
        """Its bytes as a tensor."""
        return self.tensor.view(torch.uint8).reshape(-1)

    @property
    def byte_array(self) -> memoryview:
        """Its bytes, writable."""
        return self.raw_tensor.numpy().data

    def ref_count_up(self) -> None:
        """Hold it."""
        self._num_holders += 1

    def ref_count_down(self) -> None:
        """Let it go."""
        self._num_holders -= 1
        assert self._num_holders >= 0
        self._owner.num_live -= self._num_holders == 0


@dataclass
class FakeLMCache:
    """What is seen of it from outside.

    Attributes:
        num_live: memory objects that somebody holds.
        num_open: back ends that are not closed.
        settings: those of each configuration that was made.
        is_losing: whether a block that was stored is not found again.
        is_garbling: whether a read leaves the memory as it is.
    """

    num_live: int = 0
    num_open: int = 0
    settings: list[dict[str, Any]] = field(default_factory=list)  # Any: LMCache's settings
    is_losing: bool = False
    is_garbling: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let it be imported in place of LMCache."""
        contents: dict[str, dict[str, object]] = {
            "lmcache.utils": {"CacheEngineKey": Key},
            "lmcache.v1.config": {"LMCacheEngineConfig": SimpleNamespace(from_defaults=self._configure)},
            "lmcache.v1.memory_management": {"MemoryFormat": SimpleNamespace(KV_2LTD="format")},
            "lmcache.v1.memory_allocators.mixed_memory_allocator": {"MixedMemoryAllocator": int},
            f"{BACKENDS}.local_cpu_backend": {
                "LocalCPUBackend": lambda config, memory_allocator: CPUBackend(self, memory_allocator)
            },
            f"{BACKENDS}.local_disk_backend": {
                "LocalDiskBackend": lambda config, loop, cpu: DiskBackend(self, config, loop, cpu)
            },
        }
        for name, attributes in contents.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)

    def _configure(self, **settings: object) -> SimpleNamespace:
        self.settings.append(settings)
        return SimpleNamespace(**settings)


class CPUBackend:
    """Memory objects, in so many bytes."""

    def __init__(self, owner: FakeLMCache, num_bytes: int) -> None:
        self._owner = owner
        self._num_bytes = num_bytes
        owner.num_open += 1

    def allocate(self, shape: torch.Size, dtype: torch.dtype, memory_format: str) -> Block | None:
        """Return a new memory object, None when there is no room."""
        assert memory_format == "format"
        has_room = (self._owner.num_live + 1) * shape.numel() * dtype.itemsize <= self._num_bytes
        return Block(self._owner, shape, dtype) if has_room else None

    def close(self) -> None:
        """Count it as closed."""
        self._owner.num_open -= 1


class DiskBackend:
    """A file per block, written by the threads of an event loop."""

    def __init__(
        self, owner: FakeLMCache, config: SimpleNamespace, loop: asyncio.AbstractEventLoop, cpu: CPUBackend
    ) -> None:
        self._owner = owner
        self._folder = Path(config.local_disk)
        self._folder.mkdir()
        self._loop = loop
        self._cpu = cpu
        self._shapes: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        owner.num_open += 1

    def batched_submit_put_task(
        self, keys: Sequence[Key], blocks: Sequence[Block], on_complete_callback: Callable[[Key], None]
    ) -> None:
        """Have blocks written."""
        for key, block in zip(keys, blocks, strict=True):
            job = asyncio.to_thread(self._write, key, block, on_complete_callback)
            asyncio.run_coroutine_threadsafe(job, self._loop)

    def batched_get_blocking(self, keys: Sequence[Key]) -> list[Block | None]:
        """Read blocks into new memory objects."""
        blocks: list[Block | None] = []
        for key in keys:
            block = self._cpu.allocate(*self._shapes[key], "format")
            assert block is not None
            if not self._owner.is_garbling:
                block.byte_array[:] = self._path(key).read_bytes()
            blocks.append(block)
        if self._owner.is_losing:
            blocks[-1] = None
        return blocks

    def close(self) -> None:
        """Count it as closed."""
        self._owner.num_open -= 1

    def _write(self, key: Key, block: Block, on_stored: Callable[[Key], None]) -> None:
        self._path(key).write_bytes(block.byte_array)
        self._shapes[key] = (block.tensor.shape, block.tensor.dtype)
        on_stored(key)

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key.chunk_hash:x}"
