"""Clients of a replay say what their rule lets them know, and no more."""

import pytest

from kvtier.sim.clients import ClientHints, Clients
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host
from kvtier.sim.trace import StopReason, Trace, TraceRequest

TOOL, END = StopReason.TOOL_USE, StopReason.END_TURN
TURNS = [
    TraceRequest(0.0, 1024, 50, (1, 2), TOOL),
    TraceRequest(1.0, 512, 60, (9,), END),
    TraceRequest(2.0, 1536, 70, (1, 2, 3), END),
    TraceRequest(3.0, 2048, 80, (1, 2, 3, 4), StopReason.UNKNOWN),
    TraceRequest(4.0, 2560, 90, (1, 2, 3, 4, 5), TOOL),
]


def said(known: ClientHints) -> list[dict[str, object] | None]:
    clients = Clients(known)
    return [clients.hints_of(turn) for turn in TURNS]


def test_by_default_clients_say_nothing() -> None:
    assert said(ClientHints.NONE) == [None] * 5


def test_a_client_may_expect_a_turn_to_end_as_its_last_one_did() -> None:
    tool, end = {"expected_stop": "tool_use"}, {"expected_stop": "end_turn"}
    assert said(ClientHints.AS_LAST_TURN) == [{}, {}, tool, end, {}]


def test_a_client_may_foresee_how_a_turn_ends_and_how_long_its_answer_is() -> None:
    assert said(ClientHints.FORESEEN) == [
        {"expected_stop": "tool_use", "expected_output_tokens": 50},
        {"expected_stop": "end_turn", "expected_output_tokens": 60},
        {"expected_stop": "end_turn", "expected_output_tokens": 70},
        {"expected_output_tokens": 80},
        {"expected_stop": "tool_use", "expected_output_tokens": 90},
    ]


@pytest.mark.parametrize(
    ("known", "least"), [(ClientHints.AS_LAST_TURN, 0.003), (ClientHints.FORESEEN, 0.03)]
)
def test_hints_of_agents_find_more_of_their_prefixes(
    agentic_dev: Trace, known: ClientHints, least: float
) -> None:
    num_blocks = blocks_of_share(agentic_dev, 0.05)

    without = replay_host(agentic_dev, HostCache(num_blocks, "hazard"))
    hinted = replay_host(agentic_dev, HostCache(num_blocks, "hazard", client_hints=known))

    assert hinted.hit_ratio >= without.hit_ratio + least
