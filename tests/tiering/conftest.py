"""Tiers of every kind: no outcome depends on how busy the machine is."""

import pytest
from tests.tiering.patience import be_patient


@pytest.fixture(autouse=True)
def patient_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as the guards against hangs wherever a tier on a disk waits."""
    be_patient(monkeypatch.setattr)
