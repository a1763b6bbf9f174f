"""The picture is a picture, and a place or a format that cannot be is one clear error."""

from pathlib import Path

import pytest
from tests.cli.demo.served import small_report

from kvtier.cli.demo.table import write_plot
from kvtier.errors import ConfigError

PNG_MAGIC = b"\x89PNG"


def test_a_picture_is_written(tmp_path: Path) -> None:
    write_plot(small_report(), tmp_path / "turns.png")

    assert (tmp_path / "turns.png").read_bytes().startswith(PNG_MAGIC)


@pytest.mark.parametrize("name", ["nowhere/turns.png", "turns.nonsense"])
def test_a_picture_that_cannot_be_written_is_one_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        write_plot(small_report(), tmp_path / name)
