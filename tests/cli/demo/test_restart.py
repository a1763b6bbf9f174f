"""The restart serves the last turn of each conversation, and a child that fails says so and is gone."""

from pathlib import Path

import pytest
from tests.cli.demo.served import served_turn

from kvtier.cli.demo.directory import TierDirectory
from kvtier.cli.demo.options import DevicePoolOptions, ModelOptions, SetUp
from kvtier.cli.demo.restart import choose_last_turns, serve_after_restart
from kvtier.errors import RestartError


def test_the_last_turns_of_the_conversations_served_last_are_chosen() -> None:
    served = [served_turn(conversation, number) for number in (1, 2) for conversation in range(4)]

    chosen = choose_last_turns(served, 3)

    assert [one.turn.label for one in chosen] == ["2.2", "3.2", "4.2"]


@pytest.mark.slow
def test_a_child_that_fails_is_one_error_with_what_it_said(tmp_path: Path) -> None:
    set_up = SetUp(
        ModelOptions(str(tmp_path), 1, 256, 0), DevicePoolOptions(8, 2**20, "fs"), {"root_dir": str(tmp_path)}
    )

    with pytest.raises(RestartError, match=r"status 2.*no causal model") as caught:
        serve_after_restart(set_up, TierDirectory(tmp_path), [served_turn()], lambda: None)

    assert caught.value.status == 2
