"""Hints in vLLM's envelope count as the client's own, and what is not kvtier's or makes no sense is left alone."""

import importlib
from dataclasses import dataclass, field

import pytest

from kvtier.connector.request_state import make_request_state
from kvtier.hints.envelope import MAX_ACTIONS, add_envelope
from kvtier.hints.values import RequestHints


@dataclass
class Action:
    """As vLLM's KvHintAction."""

    payload: object
    action_type: str = "kvtier.hints"
    action_version: str = "1"
    action_id: str = "a"


@dataclass
class Envelope:
    """As vLLM's KvHintsEnvelope."""

    actions: object
    protocol_version: str = "1"
    message_id: str = "m"


@dataclass
class Request:
    """A request of a vLLM with envelopes."""

    kv_hints: Envelope | None
    kv_transfer_params: dict[str, object] | None = None
    request_id: str = "r"
    num_tokens: int = 1
    num_prompt_tokens: int = 1
    block_hashes: list[bytes] = field(default_factory=list)


def test_hints_of_an_envelope_reach_the_managers() -> None:
    said = Envelope([Action({"session": "a", "returns_in_s": 30})])
    state = make_request_state(Request(said, {"session": "client", "pin_s": 5}), num_groups=1)
    assert state.context.hints == RequestHints("a", returns_in_s=30, pin_s=5)


def test_an_engine_without_envelopes_gives_what_the_client_says() -> None:
    params: dict[str, object] = {"session": "a"}
    assert add_envelope(params, None) is params
    assert make_request_state(Request(None, params), num_groups=1).context.hints == RequestHints("a")


@pytest.mark.parametrize(
    "actions",
    [
        [],
        "not a list of actions",
        7,
        [Action({"session": "a"}, action_type="other")],
        [Action({"session": "a"}, action_version="9")],
        [Action("payload")],
        [Action({"skip_load": True, "unknown": 1})],
        [object()],
        [*[Action({}, action_type="other")] * MAX_ACTIONS, Action({"session": "late"})],
    ],
)
def test_what_is_not_for_kvtier_or_makes_no_sense_changes_nothing(actions: object) -> None:
    params: dict[str, object] = {"session": "client"}
    assert add_envelope(params, Envelope(actions)) is params


def test_an_envelope_of_vllm_itself_is_read() -> None:
    try:
        protocol = importlib.import_module("vllm.v1.kv_hints.protocol")
    except ImportError:
        pytest.skip(
            "this vLLM, if there is one, has no kv_hints: install vLLM 0.32 or later to run this test"
        )
    action = protocol.KvHintAction("a", "kvtier.hints", "1", {"continues": False})
    assert add_envelope(None, protocol.KvHintsEnvelope("1", "m", [action])) == {"continues": False}
