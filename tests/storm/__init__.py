"""A storm: the production connector, managers and tiers under every fault at once, replayed exactly from a seed.

One process on one core runs a whole engine: both halves of the connector, the manager, and tiers with real code down
to a simulated disk or server. Threads run one at a time, in an order that the seed decides, on a simulated clock. The
laws are checked after each operation. ``python -m tests.storm`` runs it; a tier of your own joins as a
``StormPlace``.
"""

from tests.storm.episode import PLACES, Episode, Outcome, command_of, run_episode, shrink
from tests.storm.place import StormPlace, Weather
from tests.storm.threads import SimThreads

__all__ = [
    "PLACES",
    "Episode",
    "Outcome",
    "SimThreads",
    "StormPlace",
    "Weather",
    "command_of",
    "run_episode",
    "shrink",
]
