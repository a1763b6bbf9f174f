"""What every test needs: asserts inside the shipped suites explain themselves as those in tests do."""

import pytest
from tests.servers import describe_servers

pytest.register_assert_rewrite("kvtier.testing")


def pytest_report_header() -> str:
    """Say at the head of a run which real servers it will start."""
    return describe_servers()
