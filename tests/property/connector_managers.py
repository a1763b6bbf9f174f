"""Managers that say no when the model tells them to; within the contract, and otherwise the real ones.

They decide nothing. A block may be gone between its search and its load, and room may be missing at any time.
"""

from collections.abc import Collection

from kvtier.base import LoadStoreSpec, OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.tiering.manager import TieringOffloadingManager

GONE = OffloadKey(b"a block that nobody holds")


class Moods(OffloadingManager):
    """What a test makes a manager do, in front of the one that does the work.

    Attributes:
        is_forgetting: the next load finds a block gone.
        num_forgotten: loads that did.
        num_to_refuse: that many offers from now on find no room.
    """

    is_forgetting = False
    num_forgotten = 0
    num_to_refuse = 0

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        asked = [*keys, GONE] if self.is_forgetting else keys
        self.num_forgotten += self.is_forgetting
        self.is_forgetting = False
        return super().prepare_load(asked, req_context)  # type: ignore[safe-super]  # a manager comes after this

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if self.num_to_refuse:
            self.num_to_refuse -= 1
            return None
        return super().prepare_store(keys, req_context)  # type: ignore[safe-super]  # a manager comes after this


class MoodyCPUManager(Moods, CPUOffloadingManager):
    """The primary tier alone."""


class MoodyTieringManager(Moods, TieringOffloadingManager):
    """The primary tier and others."""
