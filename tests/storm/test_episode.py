"""Storms: no law is broken, a seed replays exactly, a failure is found, made shorter and reported with its command."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tests.storm import PLACES, Episode, StormPlace, Weather, command_of, run_episode, shrink
from tests.storm.command import main
from tests.storm.episode import join_ranges, kind_of

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tier", sorted(PLACES))
def test_no_law_is_broken_in_a_storm_over_one_tier(tier: str) -> None:
    outcome = run_episode(Episode(seed=3, num_operations=150, tiers=(tier,)))
    assert outcome.error is None
    assert outcome.num_operations == 150


def test_the_same_seed_does_the_same_again() -> None:
    first, second = (run_episode(Episode(seed=5, num_operations=150)) for _ in range(2))
    assert first.error is None
    assert first.digest == second.digest
    assert first.seen == second.seen
    assert first.digest != run_episode(Episode(seed=6, num_operations=150)).digest


@pytest.mark.slow
def test_another_process_does_the_same_again() -> None:
    command = [sys.executable, "-m", "tests.storm", "--seed", "11", "--episode", "120"]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout for _ in range(2)
    ]
    digests = [line for text in outputs for line in text.splitlines() if "digest" in line]
    assert len(digests) == 2
    assert digests[0] == digests[1]


WITHOUT_MOONCAKE = """
import sys
sys.modules["mooncake"] = None  # importing it fails
from kvtier.errors import MissingExtraError
from tests.storm import Episode, run_episode
outcome = run_episode(Episode(3, num_operations=60, tiers=("mooncake",)))
assert outcome.error is None, outcome.error
try:
    import kvtier.tiering.mooncake
except MissingExtraError:
    print(outcome.digest)
"""


def test_mooncakes_library_need_not_be_there_and_stays_missing() -> None:
    command = [sys.executable, "-c", WITHOUT_MOONCAKE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert len(done.stdout.strip()) == 16


class _ForgetfulTier(ExampleSecondaryTier):
    """Serves the bytes of the block that it was given last."""

    def submit_store(self, job: object) -> None:
        super().submit_store(job)  # type: ignore[arg-type]  # passed on as it came
        newest = next(reversed(self.blocks), None)
        if newest is not None:
            for key in list(self.blocks):
                self.blocks[key] = self.blocks[newest]


class _WrongPlace(StormPlace):
    fault_names = ("none at all",)

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        return _ForgetfulTier(config, view, 40, settings=settings)


def test_a_tier_that_serves_wrong_bytes_is_found_and_its_failure_made_shorter() -> None:
    places = {"wrong": _WrongPlace}
    tiers = ("wrong",)
    episode, outcome = next(
        (episode, outcome)
        for seed in range(20)
        if (outcome := run_episode(episode := Episode(seed, 300, tiers=tiers), places)).error is not None
    )
    assert "wrong bytes" in str(outcome.error)
    shorter = shrink(episode, outcome, run=lambda one: run_episode(one, places), max_seconds=5.0)
    assert kind_of(run_episode(shorter, places).error) == kind_of(outcome.error)
    assert len(shorter.numbers()) < outcome.num_operations


class _LazyTier(ExampleSecondaryTier):
    """Never answers a lookup."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None


class _LazyPlace(_WrongPlace):
    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        return _LazyTier(config, view, 40, settings=settings)


def test_a_tier_that_announces_blocks_and_never_finds_them_is_found() -> None:
    outcome = run_episode(Episode(1, 150, tiers=("lazy",)), {"lazy": _LazyPlace})
    assert "cannot be loaded" in str(outcome.error)


def test_a_command_replays_what_it_names() -> None:
    episode = Episode(7, 100, (1, 2, 3, 9), frozenset({"torn"}), ("fs",))
    text = command_of(episode)
    assert text.endswith("--seed 7 --episode 100 --tiers fs --keep 1-3,9 --faults torn")
    assert list(join_ranges([])) == []
    assert main(text.split()[3:]) == 0


def test_the_weather_of_a_place_is_the_storms(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Weather] = []

    class Watching(_WrongPlace):
        def build(
            self, config: OffloadingConfig, view: memoryview, settings: TierSettings
        ) -> SecondaryTierManager:
            seen.append(self.weather)
            return ExampleSecondaryTier(config, view, 40, settings=settings)

    run_episode(Episode(2, 40, tiers=("mine",)), {"mine": Watching})
    assert seen
    assert seen[0].wall_clock() > 0
    assert capsys.readouterr().out == ""


def test_after_a_storm_what_is_logged_reaches_the_log_again(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("kvtier.of_this_test")

    class Speaking(_WrongPlace):
        def build(
            self, config: OffloadingConfig, view: memoryview, settings: TierSettings
        ) -> SecondaryTierManager:
            logger.warning("not while the storm lasts")
            return ExampleSecondaryTier(config, view, 40, settings=settings)

    run_episode(Episode(2, 40, tiers=("mine",)), {"mine": Speaking})
    logger.warning("after it")
    assert caplog.messages == ["after it"]
