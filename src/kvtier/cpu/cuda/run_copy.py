"""Carries out spans as one ``copy_`` of torch's each: what works on any device, without another library.

It plans nothing. A copy costs the host some microseconds, so transfers of many small spans are bound by the host.
"""

from kvtier.cpu.cuda.descriptors import Spans
from kvtier.cpu.cuda.span_copier import Memories


class RunLauncher:
    """Launches a copy for each span.

    Args:
        memories: both ends of the spans.
    """

    def __init__(self, memories: Memories) -> None:
        self._memories = memories

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span, in order."""
        rows = self._memories.rows
        for memory, device_offset, row_offset, size in zip(
            *(column.tolist() for column in spans), strict=True
        ):
            on_device = self._memories.device[memory][device_offset : device_offset + size]
            in_row = rows[row_offset : row_offset + size]
            if is_store:
                in_row.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(in_row, non_blocking=True)
