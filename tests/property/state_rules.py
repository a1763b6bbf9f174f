"""Rules of the tiering model for recurrent states: a prefix is found only where the state at its end is, too.

The search is the connector's, over a group of blocks and a group of states. The manager knows no groups: it must keep
for a state what it keeps for any key, and what a search has found of both groups must still be there when it ends.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.property.router_law import WatchedDriver, WatchedTier

from kvtier.base import OffloadingManager, OffloadKey, ReqContext
from kvtier.connector.groups import GroupLayout
from kvtier.connector.prefix_search import find_loadable_end, split_by_need
from kvtier.testing.tier_driver import FIRST_STATE
from kvtier.testing.tier_suite import key_of

BLOCK_TOKENS = 4
GROUPS = split_by_need(
    (
        GroupLayout(0, BLOCK_TOKENS, 1, 1, num_tail_tokens=None),
        GroupLayout(1, BLOCK_TOKENS, 1, 1, num_tail_tokens=BLOCK_TOKENS, num_live_tokens=1, is_state=True),
    )
)
NUM_TRIES = 6
PROMPTS = ((0,), (0, 1), (0, 1, 2), (3, 4), (3, 4, 5), (6, 7))
"""They fit into host memory with a state; few, so that what one stores is what another looks for."""

SHORT = st.sampled_from(PROMPTS)


class Watched:
    """A manager as a search sees it, with the ready keys that it found.

    Args:
        manager: answers.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self.found: list[OffloadKey] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Look a key up."""
        answer = self._manager.lookup(key, req_context)
        if answer:
            self.found.append(key)
        return answer


class StateRules(RuleBasedStateMachine):
    """What requests of a model with states do.

    Attributes:
        driver: the engine.
        faulty: its tiers.
        loads: loads that have not ended.
        found: what the last search has found ready in host memory.
    """

    driver: WatchedDriver
    faulty: list[WatchedTier]
    loads: Sequence[object]
    found: list[OffloadKey]

    @abstractmethod
    def store(self, numbers: list[int]) -> None:
        """Store blocks from the device."""

    @abstractmethod
    def step(self) -> None:
        """End the step."""

    @abstractmethod
    def recover(self) -> None:
        """Let everything end and every tier work again."""

    @rule(numbers=SHORT, num_states=st.integers(0, 3))
    def store_with_states(self, numbers: Sequence[int], num_states: int) -> None:
        """Store the blocks of a prompt and its last states; each call may evict what the ones before it stored."""
        for position, number in enumerate(numbers):
            is_kept = position >= len(numbers) - num_states
            self.store([number, state_after(number)] if is_kept else [number])

    @rule(numbers=SHORT, others=SHORT)
    def serve_with_states(self, numbers: Sequence[int], others: Sequence[int]) -> None:
        """Serve a request as an engine does: search both groups once a step, load blocks and the state at their end.

        While it waits, others store blocks; what it has found stays.
        """
        request = ReqContext("states")
        num_found = None
        for _ in range(NUM_TRIES):
            num_found = self.search_with_states(numbers, request)
            if num_found is not None:
                break
            kept = self.found
            self.store([state_after(number) for number in others])
            self.step()
            lost = [key.hex() for key in kept if not self.driver.primary.is_ready(key)]
            assert not lost, f"a waiting request for {numbers} had found {lost}, and others have evicted them"
        if num_found and not self.loads:
            self.driver.load([*numbers[:num_found], state_after(numbers[num_found - 1])], request)
        self.driver.manager.request_finished(request)

    @rule(numbers=SHORT)
    def settle_with_states(self, numbers: Sequence[int]) -> None:
        """When everything works again, a prefix that tiers hold with its state is found, and one without is not."""
        self.recover()
        wanted = [*numbers, state_after(numbers[-1])]
        is_below = all(any(key_of(one) in tier.inner.blocks for tier in self.faulty) for one in wanted)
        # Without states before its last block the prefix is found whole or not at all.
        num_states = sum(self.is_anywhere(state_after(number)) for number in numbers)
        request = ReqContext("settled states")
        num_found = self.search_with_states(numbers, request)
        for _ in range(NUM_TRIES):
            if num_found is not None:
                break
            self.driver.step()
            num_found = self.search_with_states(numbers, request)
        assert num_found is not None, f"the search for {numbers} and its states was not answered"
        if is_below:
            assert num_found == len(numbers), "a prefix that is there with its state was not found"
        if num_states == 0:
            assert num_found == 0, "a prefix was found without any state"
        if num_found:
            self.driver.load([*numbers[:num_found], state_after(numbers[num_found - 1])], request)
        self.driver.manager.request_finished(request)

    def act_with_states(self, rng: random.Random) -> None:
        """Let one of these rules happen."""
        prompt, other, pick = rng.choice(PROMPTS), rng.choice(PROMPTS), rng.randrange(11)
        if pick < 4:
            self.store_with_states(prompt, rng.randrange(4))
        elif pick < 10:
            self.serve_with_states(prompt, other)
        else:
            self.settle_with_states(prompt)

    def search_with_states(self, numbers: Sequence[int], request: ReqContext) -> int | None:
        """Search as the connector does; return the blocks of the found prefix, None while it waits.

        What was found is ready when the search ends, and no longer prefix is ready with its state.
        """
        keys = [[key_of(number) for number in numbers], [key_of(state_after(number)) for number in numbers]]
        manager: Any = Watched(self.driver.manager)  # Any: a search looks up, and calls nothing else
        found = find_loadable_end(GROUPS, manager, keys, 0, len(numbers) * BLOCK_TOKENS, request)
        self.found = manager.found
        self.driver.manager.check()
        if found is None:
            return None
        num_found = found.end_token // BLOCK_TOKENS
        ready = [self.is_ready(numbers[:end]) for end in range(1, len(numbers) + 1)]
        assert num_found == 0 or ready[num_found - 1], f"the search for {numbers} has lost what it had found"
        assert not any(ready[num_found:]), f"the search for {numbers} stops before a state that is ready"
        return num_found

    def is_ready(self, numbers: Sequence[int]) -> bool:
        """Return whether host memory has these blocks and the state after the last one."""
        return all(self.driver.primary.is_ready(key_of(one)) for one in [*numbers, state_after(numbers[-1])])

    def is_anywhere(self, number: int) -> bool:
        """Return whether host memory or a tier has a block."""
        key = key_of(number)
        return self.driver.primary.is_ready(key) or any(key in tier.inner.blocks for tier in self.faulty)


def state_after(number: int) -> int:
    """Return the number of the state after a block. Pure."""
    return FIRST_STATE + number
