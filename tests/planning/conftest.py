"""The recorded traces of the simulator's tests."""

from tests.sim.conftest import agentic_dev as agentic_dev
from tests.sim.conftest import conversation as conversation
