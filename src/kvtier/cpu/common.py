"""Where the bytes of a transfer are in the primary tier."""

from kvtier.base import BlockIDsLoadStoreSpec


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier, in the order of the keys they belong to."""

    @staticmethod
    def medium() -> str:
        """Return "CPU", the medium of the primary tier."""
        return "CPU"
