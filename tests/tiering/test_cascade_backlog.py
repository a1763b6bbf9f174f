"""What one tier is to get: pending, withheld or refused, and each block counted once when it leaves the primary."""

from collections.abc import Collection

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.block_table import BlockTable
from kvtier.cpu.policies.learning import ReuseForecast
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.testing.tiering_driver import ROW_BYTES
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import TierSettings
from kvtier.tiering.cascade import StoreBacklog
from kvtier.tiering.departures import TierDeparture
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.guard import GuardedTier

ADMISSION = TierAdmission(0.3, 1024.0)
REQUEST = ReqContext("r")


class Told(ReuseForecast):
    """Says what it was told to, and counts what it is asked."""

    def __init__(self, **probabilities: float) -> None:
        self.probabilities = {int(name[1:]): value for name, value in probabilities.items()}
        self.horizons_s: list[float] = []
        self.num_asked = 0

    @property
    def num_remembered_blocks(self) -> int:
        return len(self.probabilities)

    def reuse_probabilities(self, keys: Collection[OffloadKey], horizon_s: float) -> list[float | None]:
        self.horizons_s.append(horizon_s)
        self.num_asked += len(keys)
        return [self.probabilities.get(int.from_bytes(key[:-4], "big")) for key in keys]


class CountedKey(bytes):
    """A key that counts how often it is compared with another; ``is`` comes first and is not counted."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.num_compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [key_of(number) for number in numbers]


def make_backlog(
    forecast: ReuseForecast | None, settings: TierSettings, budget_rows: int = 100
) -> StoreBacklog:
    tier = ExampleSecondaryTier(make_config(), make_rows(), settings=settings)
    guard = GuardedTier(tier, 8 * budget_rows * ROW_BYTES, ROW_BYTES, ManualClock())
    return StoreBacklog(guard, BlockTable(8, LRUCachePolicy(8)), forecast)


def wanting(forecast: ReuseForecast | None, budget_rows: int = 100) -> StoreBacklog:
    return make_backlog(forecast, TierSettings(admission=ADMISSION), budget_rows)


def test_a_block_is_given_when_it_is_likely_enough_to_come_back_within_the_horizon() -> None:
    forecast = Told(b1=0.31, b2=0.29, b3=0.3)
    backlog = wanting(forecast)
    backlog.offer(keys_of(1, 2, 3), REQUEST)

    assert list(backlog.take(backlog.pending)) == keys_of(1, 3)
    assert set(forecast.horizons_s) == {1024.0}


def test_a_block_of_which_nothing_is_known_is_given() -> None:
    backlog = wanting(Told(b2=0.0))
    backlog.offer(keys_of(1, 2), REQUEST)
    assert list(backlog.take(backlog.pending)) == keys_of(1)


def test_without_the_setting_nobody_is_asked() -> None:
    forecast = Told(b1=0.0)
    backlog = make_backlog(forecast, TierSettings())
    backlog.offer(keys_of(1), REQUEST)
    assert list(backlog.take(backlog.pending)) == keys_of(1)
    assert forecast.num_asked == 0


def test_a_long_backlog_is_sorted_out_in_one_pass() -> None:
    backlog = wanting(Told(**{f"b{number}": 0.1 + 0.5 * (number % 2) for number in range(20)}))
    numbers = keys_of(*range(20))
    backlog.offer([OffloadKey(CountedKey(key)) for key in numbers], REQUEST)
    CountedKey.num_compared = 0

    assert list(backlog.take(backlog.pending)) == numbers[1::2]

    assert CountedKey.num_compared <= 3 * len(numbers)


def test_a_refused_block_is_asked_about_again_with_its_next_use_and_not_before() -> None:
    forecast = Told(b1=0.1)
    backlog = wanting(forecast)
    backlog.offer(keys_of(1), REQUEST)
    assert backlog.take(backlog.pending) == ()
    forecast.probabilities[1] = 0.9
    assert backlog.take(backlog.pending) == ()
    backlog.on_used(keys_of(1), ReqContext("next"))
    assert list(backlog.take(backlog.pending)) == keys_of(1)


def test_a_refused_block_that_leaves_is_counted_as_refused_and_one_that_was_due_as_declined() -> None:
    backlog = wanting(Told(b1=0.1, b2=0.9), budget_rows=1)
    backlog.offer(keys_of(1, 2, 3), REQUEST)
    assert list(backlog.take(keys_of(1, 2))) == keys_of(2)

    backlog.on_evicted(keys_of(1, 2, 3))

    assert backlog.tier.num_refused_by_admission == 1
    assert backlog.tier.losses.num_by_reason == {TierDeparture.DECLINED: 1}
    assert not backlog.waiting_keys()


def test_a_refused_block_stays_among_those_that_the_tier_may_get() -> None:
    backlog = wanting(Told(b1=0.1))
    backlog.offer(keys_of(1), REQUEST)
    backlog.take(backlog.pending)
    assert set(backlog.waiting_keys()) == {key_of(1)}
    assert backlog.stats() == {"pending_blocks": 0.0, "refused_blocks": 1.0}


def test_no_more_blocks_are_asked_about_than_fit_and_are_refused() -> None:
    forecast = Told(b0=0.9, b1=0.1, b2=0.1, b3=0.9)
    backlog = wanting(forecast, budget_rows=2)
    backlog.offer(keys_of(*range(50)), REQUEST)
    assert list(backlog.take(backlog.pending)) == keys_of(0, 3)
    assert forecast.num_asked == 4


def test_where_nothing_fits_nobody_is_asked_and_nothing_is_refused() -> None:
    forecast = Told(b1=0.1)
    backlog = wanting(forecast, budget_rows=1)
    backlog.tier.in_flight_store_bytes += ROW_BYTES
    backlog.offer(keys_of(1), REQUEST)
    assert backlog.take(backlog.pending) == ()
    assert forecast.num_asked == 0
    assert list(backlog.pending) == keys_of(1)


def test_a_reset_forgets_what_was_refused() -> None:
    backlog = wanting(Told(b1=0.1))
    backlog.offer(keys_of(1), REQUEST)
    backlog.take(backlog.pending)
    backlog.clear()
    backlog.on_used(keys_of(1), REQUEST)
    backlog.on_evicted(keys_of(1))
    assert not backlog.waiting_keys()
    assert backlog.tier.num_refused_by_admission == 0


def test_a_block_must_be_used_often_enough_and_be_likely_to_come_back() -> None:
    forecast = Told(b1=0.9, b2=0.1)
    backlog = make_backlog(forecast, TierSettings(admission=ADMISSION, store_threshold=2))
    backlog.offer(keys_of(1, 2), REQUEST)
    assert backlog.take(backlog.pending) == ()
    assert forecast.num_asked == 0
    backlog.on_used(keys_of(1, 2), ReqContext("next"))
    assert list(backlog.take(backlog.pending)) == keys_of(1)


def test_what_would_be_wanted_is_told_without_being_offered() -> None:
    backlog = wanting(Told(b1=0.9, b2=0.1))
    assert list(backlog.wanted(keys_of(1, 2, 3))) == keys_of(1, 3)
    assert not backlog.waiting_keys()


def test_a_tier_that_waits_for_a_second_use_wants_nothing_before_it() -> None:
    backlog = make_backlog(None, TierSettings(store_threshold=2))
    backlog.on_used(keys_of(1), REQUEST)
    assert list(backlog.wanted(keys_of(1))) == []
    backlog.on_used(keys_of(1), ReqContext("next"))
    assert list(backlog.wanted(keys_of(1))) == keys_of(1)


def test_a_tier_that_is_out_of_service_wants_nothing() -> None:
    backlog = make_backlog(None, TierSettings())
    assert list(backlog.wanted(keys_of(1))) == keys_of(1)
    backlog.tier.is_out_of_service = True
    assert list(backlog.wanted(keys_of(1))) == []
