"""An outage is watched until the breaker has tried the server again; a server that is well has no aftermath."""

from benchmarks import outage
from benchmarks.outage import Fate
from kvtier.tiering.breaker import OPEN_S


def test_only_an_outage_has_an_aftermath_and_it_outlasts_an_open_breaker() -> None:
    assert outage.aftermath_s(Fate.WELL, is_quick=False) == 0
    for fate in (Fate.STOPPED, Fate.KILLED):
        assert outage.aftermath_s(fate, is_quick=False) > OPEN_S
        assert outage.aftermath_s(fate, is_quick=True) < outage.aftermath_s(fate, is_quick=False)
