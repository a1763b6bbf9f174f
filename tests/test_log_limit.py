"""A log line that repeats is one line with a count: at most ten a minute for any one cause."""

import importlib
import logging
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import pytest
from tests.connector.fakes import FakeSpec, make_config

import kvtier.connector
import kvtier.cpu
import kvtier.observe
import kvtier.recording
import kvtier.tiering
from kvtier.base import CanonicalKVCaches
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.log_limit import LIMIT, MAX_CAUSES, MAX_LINES, PERIOD_S, LogLimit, limit_log_lines
from kvtier.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def logger(clock: ManualClock) -> Iterator[logging.Logger]:
    own = logging.getLogger("kvtier.test_of_the_limit")
    limit = LogLimit(clock)
    own.addFilter(limit)
    yield own
    own.removeFilter(limit)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_ten_lines_of_a_cause_pass_and_the_next_one_has_the_count(
    logger: logging.Logger, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2700):
        logger.warning("no directory for block %d", number)
    clock.advance(PERIOD_S)
    logger.warning("no directory for block %d", 3000)
    logger.warning("no directory for block %d", 3001)

    assert lines(caplog) == [
        *(f"no directory for block {number}" for number in range(MAX_LINES)),
        "no directory for block 3000 (2,690 more lines like this one were left out in the last 60 s)",
        "no directory for block 3001",
    ]


def test_no_minute_has_more_than_ten_lines(
    logger: logging.Logger, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    times_s: list[float] = []
    for _ in range(3000):
        logger.warning("the same")
        if len(caplog.records) > len(times_s):
            times_s.append(clock())
        clock.advance(0.13)

    assert all(
        sum(start <= time_s < start + PERIOD_S for time_s in times_s) <= MAX_LINES for start in times_s
    )
    counts = [int(line.split("(")[1].split()[0].replace(",", "")) for line in lines(caplog) if "(" in line]
    assert len(caplog.records) + sum(counts) <= 3000
    assert len(times_s) > 3000 * 0.13 / PERIOD_S * MAX_LINES - MAX_LINES


def test_causes_are_told_apart_by_format_and_module(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    other = logging.getLogger("kvtier.test_of_the_limit_too")
    other.addFilter(logger.filters[0])
    for number in range(20):
        logger.warning("first %d", number)
        logger.warning("second %d", number)
        other.warning("first %d", number)

    assert len(caplog.records) == 3 * MAX_LINES


def test_a_percent_sign_in_a_line_without_arguments_is_kept(
    logger: logging.Logger, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(12):
        logger.warning("100 % full")
    clock.advance(PERIOD_S)
    logger.warning("100 % full")

    assert lines(caplog)[-1] == "100 % full (2 more lines like this one were left out in the last 60 s)"


def test_details_are_not_limited(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger.name)
    for _ in range(100):
        logger.debug("detail")

    assert len(caplog.records) == 100


def test_what_is_remembered_is_bounded(logger: logging.Logger) -> None:
    limit = LogLimit(ManualClock())
    for number in range(MAX_CAUSES + 500):
        record = logging.LogRecord("kvtier.x", logging.WARNING, "", 0, f"line {number}", None, None)
        assert limit.filter(record)

    assert len(limit._causes) == MAX_CAUSES


def test_threads_that_log_at_once_lose_no_count(
    logger: logging.Logger, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def log() -> None:
        for _ in range(500):
            logger.warning("again")

    threads = [Thread(target=log) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.advance(PERIOD_S)
    logger.warning("again")

    assert "(1,990 more lines" in lines(caplog)[-1]
    assert len(caplog.records) == MAX_LINES + 1


def test_each_half_limits_every_logger_of_the_package() -> None:
    for package in (kvtier.cpu, kvtier.tiering, kvtier.connector, kvtier.recording, kvtier.observe):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):
                importlib.import_module(module.name)
    loggers = [
        found
        for name, found in logging.Logger.manager.loggerDict.items()
        if name.startswith("kvtier.") and isinstance(found, logging.Logger)
    ]
    for build in (
        lambda: OffloadingConnectorScheduler(FakeSpec(make_config())),
        lambda: OffloadingConnectorWorker(FakeSpec(make_config())).register_kv_caches(
            CanonicalKVCaches([], [])
        ),
    ):
        for own in loggers:
            own.removeFilter(LIMIT)
        build()
        assert [own.name for own in loggers if LIMIT not in own.filters] == []


def test_putting_the_limit_on_twice_is_once() -> None:
    limit_log_lines()
    limit_log_lines()

    assert logging.getLogger("kvtier.connector.scheduler").filters.count(LIMIT) == 1
