"""Why a stored block was not loaded, from what its envelope's check found."""

from kvtier.tiering.base import TierFailure
from kvtier.tiering.envelope import Verdict

FAILURE_OF_VERDICT = {
    Verdict.DAMAGED: TierFailure.DAMAGED,
    Verdict.OTHER_KEY: TierFailure.DAMAGED,
    Verdict.OTHER_VERSION: TierFailure.FOREIGN,
    Verdict.OTHER_CODEC: TierFailure.FOREIGN,
    Verdict.OTHER_NAMESPACE: TierFailure.FOREIGN,
}
"""Damaged blocks are removed, foreign ones left alone. A block of this namespace that says it is another than its
name does can only have been moved."""

FAULTS = frozenset({TierFailure.IO_ERROR, TierFailure.TIMEOUT, TierFailure.DAMAGED})
"""What speaks against a tier; a block that was evicted, or is another instance's, does not."""
