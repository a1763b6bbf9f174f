"""Traces of chats that planning is tried on: small, always the same, with something to find in little memory."""

import random

from kvtier.sim.trace import Trace, TraceRequest, make_trace


def chats() -> Trace:
    """Return chats that go on at random, some often and some never: seven turns each at most."""
    chance = random.Random(5)
    turns = dict.fromkeys(range(16), 0)
    requests = []
    for number in range(80):
        chat = min(int(chance.expovariate(0.25)), 15)
        turns[chat] = turns[chat] % 7 + 1
        ids = tuple(100 * chat + position for position in range(turns[chat]))
        requests.append(TraceRequest(20.0 * number, 16 * len(ids), 4, ids))
    return make_trace(requests, 16)


def round_robin() -> Trace:
    """Return eight chats that take turns: what LRU is worst at, so that more memory may find less."""
    turns = [
        TraceRequest(
            10.0 * (8 * turn + chat), 16 * (turn + 1), 4, tuple(100 * chat + n for n in range(turn + 1))
        )
        for turn in range(5)
        for chat in range(8)
    ]
    return make_trace(turns, 16)
