"""What has passed in one run is left out of another: `--passed-to=FILE` adds its name, `--without=FILE` reads them.

`.ci/run` runs `make test` on a bare Debian and everything else on the machine itself. A test that was skipped there for
want of a server or a library has not passed, so it is run here. A name that is not known here leaves nothing out.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add both options."""
    parser.addoption(
        "--passed-to", type=Path, metavar="FILE", help="add the name of each test that passes to FILE"
    )
    parser.addoption(
        "--without", type=Path, metavar="FILE", help="leave out the tests whose names are in FILE"
    )


class PassedWriter:
    """Adds names to a file at the end of a run, in the process that has heard of every test.

    Args:
        path: the file; what is in it stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test whose body has passed."""
        if report.when == "call" and report.passed:
            self._passed.append(report.nodeid)
        elif report.failed and report.nodeid in self._passed:
            self._passed.remove(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the names, one a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in self._passed)


def pytest_configure(config: pytest.Config) -> None:
    """Write names where that is asked for; workers of xdist leave it to the process that started them."""
    path = config.getoption("--passed-to")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(PassedWriter(path))


def leave_out_passed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that a run before has passed.

    Args:
        config: says in which file their names are.
        items: all tests; those that are left stay in their order.
    """
    path = config.getoption("--without")
    if path is None:
        return
    passed = frozenset(path.read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
