"""A new process that fails says so, and is gone."""

from pathlib import Path

import pytest

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.restart import serve_after_restart
from kvtier.cli.demo.serving import SetUp
from kvtier.errors import RestartError


@pytest.mark.slow
def test_a_process_that_fails_is_one_error_with_what_it_said(tmp_path: Path) -> None:
    set_up = SetUp(str(tmp_path), 8, 2**20, "fs", {"root_dir": str(tmp_path)})

    with pytest.raises(RestartError, match=r"status 1.*no causal model") as caught:
        serve_after_restart(set_up, [Turn(1, 1, (1,))], lambda _: None)

    assert caught.value.status == 1
