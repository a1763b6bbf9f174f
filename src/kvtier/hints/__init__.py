"""Hints of clients: helpers that write them, and what a server reads.

``with_hints`` and ``AgentLoop`` are for clients and import no client library; ``values`` is the server's side.
"""

from kvtier.hints.client import AgentLoop, ToolTimes, with_hints
from kvtier.hints.envelope import add_envelope
from kvtier.hints.values import RequestHints, parse_hints

__all__ = ["AgentLoop", "RequestHints", "ToolTimes", "add_envelope", "parse_hints", "with_hints"]
