"""Hints in vLLM's envelope: an orchestrator attaches actions to a request, and kvtier reads those addressed to it.

    KvHintsEnvelope("1", "m-17", [KvHintAction("a-1", "kvtier.hints", "1", {"session": "chat-17", "returns_in_s": 30})])

The payload has the names and values that a client would put into ``kv_transfer_params``. Where both say something, the
orchestrator's word counts. Releases of vLLM without envelopes give none, and nothing here imports vLLM.

Source: ``vllm/v1/kv_hints/protocol.py`` of vLLM 0.31 to 0.33, which are equal.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from kvtier.hints.values import CHECKS, READER

ACTION_TYPE = "kvtier.hints"

ACTION_VERSION = "1"

MAX_ACTIONS = 64
"""Actions of one envelope that are looked at; the rest of a longer one is ignored."""

NAMES = frozenset(name for name, _, _ in CHECKS)


def add_envelope(
    params: dict[str, Any] | None,  # Any: a client's JSON
    envelope: object | None,
) -> dict[str, Any] | None:  # Any: as above
    """Return a request's ``kv_transfer_params`` with the hints of its envelope; ``params`` itself without any. Pure.

    Args:
        params: the client's; not changed.
        envelope: vLLM's ``KvHintsEnvelope``; None without one.
    """
    if envelope is None:
        return params
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, Sequence):
        READER.warn("kv_hints.actions", actions, "give a list of actions")
        return params
    found: dict[str, Any] = {}  # Any: JSON, checked where hints are read
    for action in islice(actions, MAX_ACTIONS):
        if getattr(action, "action_type", None) == ACTION_TYPE:
            found |= _hints_of(action)
    return {**(params or {}), **found} if found else params


def _hints_of(action: object) -> dict[str, Any]:  # Any: JSON, checked where hints are read
    version, payload = getattr(action, "action_version", None), getattr(action, "payload", None)
    if version != ACTION_VERSION:
        READER.warn("kv_hints.action_version", version, f"give {ACTION_VERSION!r} for {ACTION_TYPE}")
        return {}
    if not isinstance(payload, Mapping):
        READER.warn("kv_hints.payload", payload, "give a mapping of hints")
        return {}
    return {name: value for name, value in payload.items() if name in NAMES}
