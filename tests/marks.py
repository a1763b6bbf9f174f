"""Which tests `make test` leaves to `make test-all`: those marked `servers`, `traces`, `walks` or `slow`.

A test that takes one of the fixtures below gets its mark here, so none can forget it. A module that starts a server
without such a fixture says ``pytestmark = pytest.mark.servers``; `tests/architecture/test_marks.py` looks for that.
"""

from collections.abc import Iterable, Mapping

import pytest

MARKED_FIXTURES: Mapping[str, frozenset[str]] = {
    "servers": frozenset(
        {
            "start_server",
            "cluster",
            "shared_server",
            "small_server",
            "tls_server",
            "shared_store",
            "cleared_store",
        }
    ),
    "traces": frozenset({"conversation", "agentic_dev"}),
}
"""By mark, the fixtures that start a real server or read a recorded trace."""


def mark_by_fixtures(items: Iterable[pytest.Item]) -> None:
    """Mark each test that takes such a fixture, be it through another one."""
    for item in items:
        taken = frozenset(getattr(item, "fixturenames", ()))
        for mark, fixtures in MARKED_FIXTURES.items():
            if fixtures & taken:
                item.add_marker(mark)
