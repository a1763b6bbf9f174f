"""Carries out spans with one call: ``cudaMemcpyBatchAsync``, from CUDA 12.8 on, through ``cuda-python``.

It plans nothing. The copies of a batch run on the copy engines and leave the processors of the device to the model.
cuda-python is optional. Its releases for CUDA 12 and 13 take the same arguments; the first also returns which copy
was refused.

The calls have not been confirmed on a device; tests put a runtime of their own in its place.
"""

import importlib
from collections.abc import Callable
from typing import Any

from kvtier.cpu.cuda.descriptors import Spans
from kvtier.cpu.cuda.span_copier import Memories
from kvtier.errors import DeviceCopyError


class BatchLauncher:
    """Launches all spans as one batch.

    Args:
        memories: both ends of the spans; the rows should be pinned.
        bindings: ``cuda.bindings.runtime``.
        current_stream: returns the handle of the stream to launch on.
    """

    def __init__(self, memories: Memories, bindings: Any, current_stream: Callable[[], int]) -> None:  # noqa: ANN401  # no types where it is not installed
        self._memories = memories
        self._bindings = bindings
        self._current_stream = current_stream
        self._attributes = bindings.cudaMemcpyAttributes()
        # In the order of the stream: a store reads what compute before it wrote.
        self._attributes.srcAccessOrder = bindings.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes.flags = int(bindings.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span; they may be carried out in any order.

        Raises:
            DeviceCopyError: the runtime refused; some of the copies may have been launched.
        """
        stream = self._current_stream()
        if stream == 0:
            raise DeviceCopyError("cudaMemcpyBatchAsync", "the default stream", len(spans.sizes), None)
        on_device, in_rows = self._memories.addresses(spans)
        destinations, sources = (in_rows, on_device) if is_store else (on_device, in_rows)
        # The runtime has read the lists when it returns.
        code, *failed = self._bindings.cudaMemcpyBatchAsync(
            destinations.tolist(),
            sources.tolist(),
            spans.sizes.tolist(),
            len(spans.sizes),
            [self._attributes],
            [0],
            1,
            stream,
        )
        if int(code) != 0:
            raise DeviceCopyError(
                "cudaMemcpyBatchAsync", code, len(spans.sizes), failed[0] if failed else None
            )


def find_batch_bindings() -> tuple[Any, str | None]:  # Any: no types where it is not installed
    """Return cuda-python's runtime, and why it cannot be used: None where it can."""
    try:
        bindings = importlib.import_module("cuda.bindings.runtime")
    except Exception as error:  # noqa: BLE001  # thread top: a broken optional library raises what it likes
        return None, f"cuda-python cannot be imported ({error}): pip install cuda-bindings of your CUDA"
    if not hasattr(bindings, "cudaMemcpyBatchAsync"):
        return None, "cuda-python is older than CUDA 12.8: install a later cuda-bindings"
    return bindings, None
