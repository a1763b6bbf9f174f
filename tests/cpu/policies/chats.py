"""A synthetic trace of chats, from a seed, for golden counts where there is no recorded trace.

Half of the requests are turns of chats: each chat begins with one of eight shared prompts, and every turn repeats the
previous ones and adds some blocks. The other half are single prompts. It uses only ``random()``, which gives the same
numbers on every machine and version.
"""

import random

from kvtier.sim.trace import Trace, TraceRequest, make_trace

CHATS_PER_H = 400
LONE_PROMPTS_PER_H = 1_500
HOUR_S = 3_600.0
BLOCK_TOKENS = 512
ANSWER_TOKENS = 300


def make_chats(seed: int = 7, num_hours: int = 1) -> Trace:
    """Return the trace of ``seed``; an hour has about 3,100 requests and 35,000 blocks. Pure."""
    duration_s = num_hours * HOUR_S
    rng = random.Random(seed)

    def draw(low: int, high: int) -> int:
        return low + int(rng.random() * (high - low + 1))

    num_ids = 0

    def new_blocks(count: int) -> list[int]:
        nonlocal num_ids
        num_ids += count
        return list(range(num_ids - count, num_ids))

    shared = [new_blocks(draw(2, 6)) for _ in range(8)]
    requests: list[TraceRequest] = []

    def ask(arrival_s: float, blocks: list[int]) -> None:
        requests.append(TraceRequest(arrival_s, BLOCK_TOKENS * len(blocks), ANSWER_TOKENS, tuple(blocks)))

    for _ in range(CHATS_PER_H * num_hours):
        arrival_s = rng.random() * duration_s
        blocks = list(shared[int(8 * rng.random() ** 2)])
        for _ in range(draw(1, 7)):
            blocks += new_blocks(draw(1, 6))
            ask(arrival_s, blocks)
            arrival_s += 15.0 + 300.0 * rng.random() ** 2
    for _ in range(LONE_PROMPTS_PER_H * num_hours):
        ask(rng.random() * duration_s, new_blocks(draw(2, 16)))
    return make_trace(requests, BLOCK_TOKENS)
