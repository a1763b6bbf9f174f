"""The waits of tiers, in tests as long as the guards against hangs, and their rests, which tests do not take.

In an engine waits are short, because a thread that waits moves nothing else. On a busy machine a short one ends before
the thread that is waited for has run, and the outcome of a test would depend on luck. A rest after a walk for quotas is
many times as long as the walk, which takes seconds there. A test of what happens when a wait ends sets its own.
"""

from collections.abc import Callable

import pytest

from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.fs import directory_lock
from kvtier.tiering.fs import store as pack_store
from kvtier.tiering.kit.blobs import evictor as blob_evictor

PATIENT_S = 60.0

WAITS: dict[object, dict[str, float]] = {
    blob_evictor: {"PAUSE_FACTOR": 0},
    pack_store: {"INDEX_WAIT_S": PATIENT_S, "PEER_WAIT_S": PATIENT_S},
    directory_lock: {"LOCK_WAIT_S": PATIENT_S},
}


def be_patient(set_value: Callable[[object, str, float], None] = setattr) -> None:
    """Lengthen the waits of this process.

    Args:
        set_value: sets an attribute of a module; that of a ``pytest.MonkeyPatch`` takes it back after the test.
    """
    for module, waits in WAITS.items():
        for name, value in waits.items():
            set_value(module, name, value)


def choose_timeout_s(request: pytest.FixtureRequest, short_s: float) -> float:
    """Return how long a tier waits for its server in a test of ServerTierSuite.

    Args:
        request: of the test.
        short_s: for tests in which the server hangs, and which wait for that; in all others none does.
    """
    return PATIENT_S if hasattr(TierSuite, request.node.originalname) else short_s
