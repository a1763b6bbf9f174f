"""Registers a region with CUDA, so that the link reads and writes it without a copy in between.

It maps no memory; ``shared_offload_region`` does. The calls have not been confirmed on a device.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvtier.cpu.shared_offload_region import SharedOffloadRegion

logger = logging.getLogger(__name__)

cuda: Any = torch.cuda  # Any: torch does not annotate its CUDA interface


def pin_region(region: SharedOffloadRegion) -> Callable[[], None] | None:
    """Register the region with CUDA; return how to undo it, None when the driver refused."""
    address = np.frombuffer(region.mapping(), dtype=np.int8).ctypes.data
    runtime = cuda.cudart()
    code = runtime.cudaHostRegister(address, region.total_size_bytes, 0)
    if int(code) != 0:
        logger.warning(
            "region %s cannot be pinned (CUDA error %s): copies will be slow", region.mmap_path, code
        )
        return None
    return partial(runtime.cudaHostUnregister, address)
