"""What every test needs: asserts inside the shipped suites explain themselves as those in tests do."""

import pytest

pytest.register_assert_rewrite("kvtier.testing")
