"""Lets an engine multiply matrices of 16 bits as float64 where the CPU has no instructions for 16 bits.

Without them torch takes many times as long. Models with recurrent states have only kernels for bfloat16 on CPUs. Sums
in float64 are the same in 16 bits whatever the batch, as torch's are; in float32 rounding would depend on it.
"""

from functools import wraps

import torch

linear = torch.nn.functional.linear


@wraps(linear)
def linear_in_float64(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``torch.nn.functional.linear`` does, and round the sums once, to the dtype of ``rows``."""
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return linear(rows, weight, bias)
    sums = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    return sums.to(rows.dtype)


def register() -> None:
    """Use it in this process from now on, if it is faster."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.nn.functional.linear = linear_in_float64  # type: ignore[assignment]  # its stub names every argument
