"""The worker side: what a transfer reads and writes, the handlers that copy, and the engine's KV cache as bytes.

Source: the contracts follow vLLM's KV offloading subsystem as of May 2026 (pull requests 37874 and 36644).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVCacheLayoutError

if TYPE_CHECKING:
    import torch

TransferJobId = NewType("TransferJobId", int)
"""A job of the connector: device -> primary or primary -> device."""

BlockIds = npt.NDArray[np.int64]
"""Numbers of device blocks or slots, shape (num_blocks,)."""


class LoadStoreSpec(ABC):
    """Where the bytes of a transfer are, on one medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium, for example "GPU"."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Blocks named by number.

    Args:
        block_ids: block or slot numbers, any iterable of integers.
    """

    def __init__(self, block_ids: Iterable[int]) -> None:
        if isinstance(block_ids, np.ndarray):
            self.block_ids: BlockIds = block_ids.astype(np.int64, copy=False).reshape(-1)
        else:  # np.asarray takes half as long again for a list of numbers, because it looks for nesting
            self.block_ids = np.fromiter(block_ids, np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Device blocks, ordered by KV group.

    Args:
        block_ids: device block numbers, all groups one after another.
        group_sizes: how many of them belong to each group.
        block_indices: for each group the index, within the request, of its first block here, so that a
            worker can enter the middle of an offloaded block.

    Raises:
        KVCacheLayoutError: the lengths disagree.
    """

    def __init__(
        self, block_ids: Iterable[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> None:
        super().__init__(block_ids)
        self.group_sizes = tuple(group_sizes)
        self.block_indices = tuple(block_indices)
        if sum(self.group_sizes) != len(self.block_ids):
            raise KVCacheLayoutError(
                f"group_sizes={self.group_sizes} sum to {sum(self.group_sizes)} but there are "
                f"{len(self.block_ids)} block ids: give one size for each group, in order"
            )
        if len(self.group_sizes) != len(self.block_indices):
            raise KVCacheLayoutError(
                f"{len(self.group_sizes)} group sizes but {len(self.block_indices)} block indices: "
                "give one of each for every group"
            )

    @staticmethod
    def medium() -> str:
        return "GPU"


class OffloadingHandler(ABC):
    """The worker side of one direction: copies between two media, asynchronously.

    Called from one thread.
    """

    @abstractmethod
    def transfer_async(self, job_id: TransferJobId, spec: "TransferSpec") -> bool:
        """Start a transfer; False when it could not be started, and then it is never reported."""

    def transfer_joined(self, jobs: "Mapping[TransferJobId, TransferSpec]") -> set[TransferJobId]:
        """Start transfers in their order, each with the outcome that it would have alone.

        For handlers that copy small transfers of many requests with one call.

        Returns:
            Those that were started; each of them is reported by itself, the others never.
        """
        return {job_id for job_id, spec in jobs.items() if self.transfer_async(job_id, spec)}

    @abstractmethod
    def get_finished(self) -> list["TransferResult"]:
        """Return the jobs that ended since the last call, each exactly once; does not block."""

    @abstractmethod
    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has succeeded or failed; unknown ids are ignored."""

    def shutdown(self) -> None:
        """Shut down the handler after its started copies; idempotent."""


class TransferSpec(NamedTuple):
    """A transfer: source and destination."""

    source: LoadStoreSpec
    destination: LoadStoreSpec


class TransferType(NamedTuple):
    """The media of a transfer, for example ("GPU", "CPU")."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a transfer.

    Attributes:
        job_id: the job.
        success: False when any byte may be missing.
        transfer_size: bytes moved, without padding.
        transfer_time: seconds of the copy itself.
        transfer_type: the media.
        deviations: of a job that compares instead of copying, how far each block is from what is held, in the order of
            its slots: 0 for equal bytes, at most 1 within the tolerance.
    """

    job_id: TransferJobId
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One tensor of the engine's KV cache, as bytes.

    Attributes:
        tensor: shape (num_blocks, page_size_bytes), int8, on the device; rows may be strided.
        page_size_bytes: bytes from the start of one page to its end, padding included.
    """

    tensor: "torch.Tensor"
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A layer's bytes within a canonical tensor.

    Attributes:
        tensor_idx: index into ``CanonicalKVCaches.tensors``.
        page_size_bytes: bytes of one page without padding; they are the first of the tensor's page.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The KV cache of one worker in the form that handlers use.

    Attributes:
        tensors: the tensors, in the order of their bytes in a row.
        group_data_refs: for each KV group what to copy, in the order of the bytes in a row.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]
