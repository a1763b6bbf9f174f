"""Sends small arrays of numbers to a device without making the host wait.

A copy from pageable memory first waits for everything launched before it on its stream, compute included. Torch's
pool of pinned memory gives a buffer, and takes it back when the stream has passed the copy.
"""

import torch

from kvtier.cpu.cuda.descriptors import Offsets


def upload(array: Offsets, device: torch.device) -> torch.Tensor:
    """Return the array on ``device``, valid for work launched later on the current stream.

    Args:
        array: int64; it may be changed as soon as this returns where the device is not the CPU.
        device: where to.
    """
    if device.type != "cuda":
        return torch.from_numpy(array)
    staged = torch.empty(array.shape, dtype=torch.int64, pin_memory=True)
    staged.numpy()[...] = array
    return staged.to(device, non_blocking=True)
