"""What only an ended session has used leaves first; what others share does not, and a liar is not heard."""

from kvtier.base import OffloadKey
from kvtier.cpu.policies.ended_sessions import LEAST_COUNTED, ReturnWatch
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.hints.values import NO_HINTS, RequestHints
from kvtier.testing.policy_suite import insert_ready, key_of

END = RequestHints(session="a", continues=False)
GO_ON = RequestHints(session="a", continues=True)


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [key_of(number) for number in numbers]


def make_policy() -> LRUCachePolicy:
    policy = LRUCachePolicy(100)
    policy.note_request(ArrivedRequest("first", (), 0.0, GO_ON))
    watch = policy._ended.watch
    assert watch is not None
    prove_hints(watch)
    return policy


def prove_hints(watch: ReturnWatch) -> None:
    """Let none of the blocks that were said to have ended come back, and all of the oldest."""
    for turn in range(2 * int(LEAST_COUNTED)):
        ended = [OffloadKey(b"ended" + turn.to_bytes(2, "big") + bytes([number])) for number in range(32)]
        oldest = [OffloadKey(b"old" + turn.to_bytes(2, "big") + bytes([number])) for number in range(64)]
        watch.on_ended(ended)
        watch.on_evicted(oldest)
        watch.on_named(oldest)
    assert watch.favours_ended


def serve(policy: LRUCachePolicy, req_id: str, at_s: float, hints: RequestHints, *numbers: int) -> None:
    keys = keys_of(*numbers)
    policy.note_request(ArrivedRequest(req_id, (keys,), at_s, hints))
    insert_ready(policy, [key for key in keys[::-1] if policy.get(key) is None])
    policy.touch(keys)
    policy.on_finished(req_id)


def test_an_ended_session_leaves_first_tail_first() -> None:
    policy = make_policy()
    serve(policy, "old", 0.0, NO_HINTS, 1, 2)
    serve(policy, "turn 1", 1.0, GO_ON, 10, 11)
    serve(policy, "turn 2", 2.0, END, 10, 11, 12)
    assert policy.next_victims(5) == keys_of(12, 11, 10, 2, 1)


def test_until_the_last_request_has_finished_nothing_moves() -> None:
    policy = make_policy()
    serve(policy, "old", 0.0, NO_HINTS, 1)
    insert_ready(policy, keys_of(2))
    policy.note_request(ArrivedRequest("last", (keys_of(2),), 1.0, END))
    assert policy.next_victims(2) == keys_of(1, 2)


def test_what_another_request_names_too_stays_where_it_is() -> None:
    policy = make_policy()
    serve(policy, "turn 1", 0.0, GO_ON, 1, 10)
    serve(policy, "other", 1.0, NO_HINTS, 1, 20)
    serve(policy, "turn 2", 2.0, END, 1, 10, 11)
    assert policy.next_victims(4) == keys_of(11, 10, 20, 1)


def test_what_was_held_before_the_first_hint_has_no_owner() -> None:
    policy = make_policy()
    serve(policy, "unhinted", 0.0, NO_HINTS, 1)
    serve(policy, "other", 1.0, NO_HINTS, 5)
    serve(policy, "last", 2.0, END, 1, 2)
    assert policy.next_victims(3) == keys_of(2, 5, 1)


def test_a_request_of_low_priority_leaves_first_and_a_session_without_a_name_is_one_request() -> None:
    policy = make_policy()
    serve(policy, "old", 0.0, NO_HINTS, 1)
    serve(policy, "batch", 1.0, RequestHints(priority=-1), 2, 3)
    serve(policy, "nameless", 2.0, RequestHints(continues=False), 2, 4)
    assert policy.next_victims(4) == keys_of(4, 3, 1, 2)


def test_a_tenant_whose_ended_sessions_come_back_is_not_heard() -> None:
    policy = make_policy()
    for number in range(40):
        said = RequestHints(session=f"s{number // 2}", tenant="liar", continues=False)
        serve(policy, f"r{number}", float(number), said, 100 + number // 2)
    oldest = policy.next_victims(1)
    serve(policy, "lie", 50.0, RequestHints(session="x", tenant="liar", continues=False), 7)
    assert policy.next_victims(1) == oldest != keys_of(7)


def test_owners_are_bounded_and_nothing_is_kept_without_hints() -> None:
    policy = make_policy()
    for number in range(500):
        serve(policy, f"r{number}", float(number), NO_HINTS, number % 50)
    assert not policy._ended._owners
    for number in range(5_000):
        policy.note_request(ArrivedRequest(str(number), (keys_of(number + 10**4),), 500.0, GO_ON))
    assert len(policy._ended._owners) <= 201


def test_clear_forgets_sessions() -> None:
    policy = make_policy()
    serve(policy, "turn", 0.0, GO_ON, 1)
    policy.clear()
    assert not policy._ended._owners
