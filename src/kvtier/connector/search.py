"""The search for one request: how far it can be loaded now.

``prefix_search`` looks up its blocks, up to where the engine, the client and the features let it load. Blocks that are
being loaded for another request are waited for and not loaded twice.
"""

from collections.abc import Callable, Sequence

from kvtier.base import OffloadingManager
from kvtier.connector.groups import GroupLayout
from kvtier.connector.jobs import TransferJobs
from kvtier.connector.planning import iterate_load_keys
from kvtier.connector.prefix_search import find_loadable_end, find_max_end, split_by_need
from kvtier.connector.request_state import RequestState


class PrefixSearch:
    """Searches for the requests of one scheduler half. Used from one thread.

    Args:
        layouts: the KV groups.
        manager: which blocks are held.
        jobs: the open jobs.
        computes_last_token: whether the engine computes the last token of a prompt again that is loaded as a whole.
        limits: how far features let a request load (``RequestFeature.limit``).
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        manager: OffloadingManager,
        jobs: TransferJobs,
        computes_last_token: bool,
        limits: Sequence[Callable[[RequestState, int, int], int | None]],
    ) -> None:
        self._layouts = layouts
        self._groups = split_by_need(layouts)
        self._manager = manager
        self._jobs = jobs
        may_compute_last_token = all(layout.can_compute_last_token for layout in layouts)
        self._computes_last_token = computes_last_token and may_compute_last_token
        self._limits = limits

    def find_end(self, state: RequestState, first_token: int) -> int | None:
        """Return up to which token to load the request; None when it has to wait.

        Args:
            state: the request, its keys grown.
            first_token: leading tokens that the device has.

        Effects:
            ``state.search``. The first end that is found renews the request's blocks.
        """
        if state.load.has_failed:
            return first_token
        # The engine needs a token to compute: without one there is no output to sample from.
        max_end_token = state.request.num_tokens - 1
        if self._computes_last_token:
            max_end_token = find_max_end(self._groups, state.request.num_tokens, first_token)
        search = state.search
        search.max_end_token = max_end_token
        if state.limits.max_load_tokens is not None:
            max_end_token = min(max_end_token, state.limits.max_load_tokens)
        for limit in self._limits:
            limited = limit(state, first_token, max_end_token)
            if limited is None:
                return None
            max_end_token = limited
        found = search.found = find_loadable_end(
            self._groups, self._manager, state.keys, first_token, max_end_token, state.context
        )
        if found is None:
            return None
        if self._jobs.loading and found.end_token > first_token:
            wanted = iterate_load_keys(self._layouts, state.keys, first_token, found.end_token)
            search.blocking_job = self._jobs.find_load_of(wanted)
            if search.blocking_job is not None:
                return None
        if not search.is_touched:
            search.is_touched = True
            self.touch(state, state.request.num_tokens)
        return found.end_token

    def touch(self, state: RequestState, end_token: int) -> None:
        """Touch the request's blocks, the first most recent, so that its tail is evicted first."""
        if keys := state.keys_by_position(self._layouts, end_token):
            self._manager.touch(keys, state.context)
