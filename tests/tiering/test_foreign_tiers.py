"""Whatever a tier raises when it is reached ends no start unless the tier is required, and is one line."""

import pytest
from tests.testing.server_in_memory import MemoryBlockStore, MemoryTier, ServerInMemory
from tests.tiering.test_spec import make_config

from kvtier.base import ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.testing.tier_suite import key_of, make_rows
from kvtier.tiering.base import FAILURES_TO_OPEN, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.factory import TIERS
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.spec import TieringOffloadingSpec

ERRORS = [
    OSError(5, "secret"),
    ValueError("secret"),
    RecursionError("secret"),
    MemoryError("secret"),
    KeyError("secret"),
    UnicodeError("secret"),
    RuntimeError("secret\nwith lines"),
    AssertionError(),
]
current: list[Exception] = []
"""What the tier raises now."""


class StrangeTier(ExampleSecondaryTier):
    """Raises when it is reached."""

    @staticmethod
    def get_tier_type() -> str:
        return "strange"

    def check_reachable(self) -> None:
        raise current[-1]

    def drain_unanswered(self) -> int:
        return 0


class StrangeStore(MemoryBlockStore):
    """Raises whatever it is asked."""

    def check_reachable(self) -> None:
        raise current[-1]

    def contains_batch(self, *args: object) -> list[bytes]:  # type: ignore[override]  # it never answers
        raise current[-1]

    store = load = contains_batch  # type: ignore[assignment]  # likewise


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_required", [False, True])
def test_a_start(error: Exception, is_required: bool, caplog: pytest.LogCaptureFixture) -> None:
    current.append(error)
    if "strange" not in TIERS:
        TIERS.register("strange", f"{__name__}:StrangeTier")
    name = f"strange-{type(error).__name__}-{is_required}"
    spec = TieringOffloadingSpec(
        make_config(None, name, secondary_tiers=[{"type": "strange", "required": is_required}])
    )
    if is_required:
        with pytest.raises(TierError) as refusal:
            spec.get_manager()
        lines = [str(refusal.value)]
    else:
        manager = spec.get_manager()
        assert manager.lookup(key_of(1), ReqContext("a")) is False
        spec.shutdown()
        lines = [one.getMessage() for one in caplog.records if "strange" in one.getMessage()]
    assert len(lines) == 1
    assert "cannot be reached" in lines[0]
    assert "secret" not in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_tier_with_threads_opens_its_breaker_and_says_one_line(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    current.append(error)
    rows = make_rows()
    config: OffloadingConfig = make_config(None, "strange-threads")
    tier = MemoryTier(config, rows, StrangeStore(ServerInMemory(), rows_of(rows)))
    tier.settings = TierSettings()
    with pytest.raises(TierError):
        tier.check_reachable()
    assert tier.drain_unanswered() == FAILURES_TO_OPEN
    while tier.lookup(key_of(1), ReqContext("a")) is None:
        tier.end_step()
    assert tier.drain_unanswered() == 1
    assert tier.shutdown(60.0)
    lines = [one.getMessage() for one in caplog.records]
    assert len(lines) == 1
    assert "secret" not in lines[0]
