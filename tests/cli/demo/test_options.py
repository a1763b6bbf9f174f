"""Options that cannot work are refused by name, and a set-up survives its way through JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cli.demo.options import DevicePoolOptions, ModelOptions, SetUp, require_new_file
from kvtier.errors import ConfigError, KVTierError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelOptions("/no/such/model", 1, 256, 0), "--model"),
        (lambda: ModelOptions(None, 0, 256, 0), "--layers"),
        (lambda: ModelOptions(None, 1, 100, 0), "--hidden.*multiple of 256"),
        (lambda: ModelOptions(None, 1, 0, 0), "--hidden"),
        (lambda: ModelOptions(None, 1, 256, -1), "--seed"),
        (lambda: DevicePoolOptions(0, 1, "fs"), "--device-blocks"),
        (lambda: DevicePoolOptions(1, 1, "sf"), "did you mean 'fs'"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(KVTierError, match=message):
        make()


def test_a_set_up_survives_its_way_through_json() -> None:
    set_up = SetUp(
        ModelOptions(None, 2, 256, 7), DevicePoolOptions(8, 2**20, "fs"), {"root_dir": "/some/where"}
    )

    assert SetUp.from_json(json.loads(json.dumps(set_up.to_json()))) == set_up


def test_a_file_for_results_needs_its_directory_now(tmp_path: Path) -> None:
    require_new_file("--json", None)
    require_new_file("--json", tmp_path / "numbers.json")
    for path in (tmp_path / "missing" / "numbers.json", tmp_path):
        with pytest.raises(ConfigError, match="--json"):
            require_new_file("--json", path)
