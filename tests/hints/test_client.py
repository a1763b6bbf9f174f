"""What clients send is what the server reads, and an agent's loop learns when it will be back."""

from collections.abc import Callable

import pytest

from kvtier.errors import ConfigError
from kvtier.hints import AgentLoop, RequestHints, ToolTimes, parse_hints, with_hints
from kvtier.hints.client import MAX_TOOLS
from kvtier.testing.clock import ManualClock


def read(body: dict[str, object]) -> RequestHints:
    params = body["kv_transfer_params"]
    assert isinstance(params, dict)
    return parse_hints(params)


def test_what_a_client_gives_is_what_the_server_reads() -> None:
    body = with_hints(session="a", continues=True, returns_in_s=30, pin_s=600, priority=1)
    assert read(body) == RequestHints("a", None, True, 30, 600, 1)


def test_the_rest_of_the_body_is_kept_and_not_changed() -> None:
    own = {"top_k": 5, "kv_transfer_params": {"skip_load": True, "session": "old"}}
    body = with_hints(session="new", extra_body=own)
    assert body == {"top_k": 5, "kv_transfer_params": {"skip_load": True, "session": "new"}}
    assert own["kv_transfer_params"] == {"skip_load": True, "session": "old"}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: with_hints(session=""), "session"),
        (lambda: with_hints(returns_in_s=-1), "returns_in_s"),
        (lambda: with_hints(returns_in_s=float("nan")), "returns_in_s"),
        (lambda: with_hints(pin_s=1e9), "pin_s"),
        (lambda: with_hints(priority=5), "priority"),
        (lambda: with_hints(continues=False, returns_in_s=3), "returns_in_s"),
        (lambda: AgentLoop(""), "session"),
    ],
)
def test_what_the_server_would_ignore_is_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()


def run(loop: AgentLoop, clock: ManualClock, *tools: tuple[str, float]) -> RequestHints:
    """Send a request, answer it in 2 s, run the tools, and return the hints of the next request."""
    loop.hints()
    clock.advance(2.0)
    for name, duration_s in tools:
        with loop.tool(name):
            clock.advance(duration_s)
    return read(loop.hints())


def test_a_loop_that_knows_nothing_says_that_it_goes_on() -> None:
    assert read(AgentLoop("run").hints()) == RequestHints("run", continues=True)


def test_a_loop_learns_how_long_its_tools_take() -> None:
    clock = ManualClock()
    loop = AgentLoop("run", clock=clock)
    for _ in range(10):
        run(loop, clock, ("search", 4.0))
    found = read(loop.hints())
    assert found.continues
    assert found.returns_in_s == pytest.approx(6.0, rel=0.05)
    for _ in range(10):
        run(loop, clock, ("search", 40.0))
    assert read(loop.hints()).returns_in_s == pytest.approx(42.0, rel=0.15)


def test_each_tool_has_its_own_time_and_those_at_the_same_time_end_with_the_longest() -> None:
    clock = ManualClock()
    loop = AgentLoop("run", clock=clock)
    for _ in range(10):
        run(loop, clock, ("search", 4.0))
        run(loop, clock, ("build", 100.0))
    assert read(loop.hints(["search"])).returns_in_s == pytest.approx(6.0, rel=0.05)
    assert read(loop.hints(["search", "build"])).returns_in_s == pytest.approx(102.0, rel=0.05)
    assert read(loop.hints(["unheard of"])).returns_in_s is None


def test_what_comes_after_what_is_learned_too() -> None:
    clock = ManualClock()
    loop = AgentLoop("run", clock=clock)
    for _ in range(10):
        run(loop, clock, ("edit", 1.0))
        after_build = run(loop, clock, ("build", 100.0))
    after_edit = run(loop, clock, ("edit", 1.0))
    assert after_edit.returns_in_s == pytest.approx(102.0, rel=0.1)
    assert after_build.returns_in_s == pytest.approx(3.0, rel=0.1)


def test_a_tool_that_fails_has_taken_its_time() -> None:
    clock = ManualClock()
    loop = AgentLoop("run", clock=clock)
    loop.hints()

    def fail() -> None:
        with loop.tool("fetch"):
            clock.advance(30.0)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert read(loop.hints(["fetch"])).returns_in_s == pytest.approx(30.0, rel=0.05)


def test_the_last_request_says_that_the_run_ends() -> None:
    assert read(AgentLoop("run").hints(is_last=True)) == RequestHints("run", continues=False)


def test_loops_that_share_their_times_learn_from_each_other_in_bounded_memory() -> None:
    times = ToolTimes()
    for number in range(3 * MAX_TOOLS):
        times.add(f"tool {number}", 1.0, before=f"tool {number - 1}")
    assert times.expected_s(["tool 0"]) is None
    assert times.expected_s([f"tool {3 * MAX_TOOLS - 1}"]) == pytest.approx(1.0)
    assert len(times._log_s) == MAX_TOOLS
    assert len(times._after) <= MAX_TOOLS + 1
    assert read(AgentLoop("other", times).hints()).returns_in_s == pytest.approx(1.0)
