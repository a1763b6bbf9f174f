"""An error about a field is said of the option that filled it; whatever else is raised stays as it is."""

import pytest

from kvtier.cli.option_names import naming_options
from kvtier.errors import ConfigError, NamedClassError, UnknownNameError

OPTIONS = {"size_bytes": "--size", "colour": "--colour"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("size_bytes", 0, "must be more"), "--size=0: must be more"),
        (ConfigError("other", 0, "must be more"), "other=0: must be more"),
        (
            UnknownNameError("colour", "rd", ["red"]),
            "unknown colour for --colour 'rd': did you mean 'red'? known are red",
        ),
        (
            UnknownNameError("colour", "scarlet", ["red"], meant=["red"], also="or a number"),
            "unknown colour for --colour 'scarlet': did you mean 'red'? known are red; or a number",
        ),
        (
            NamedClassError("colour", "a:B", "is none: write one"),
            "colour for --colour 'a:B': is none: write one",
        ),
        (NamedClassError("shape", "a:B", "is none"), "shape 'a:B': is none"),
        (
            ConfigError("size_bytes", "9" * 200, "is too much", max_value_chars=5),
            "--size='9999...: is too much",
        ),
        (UnknownNameError("shape", "x", ["y"]), "unknown shape 'x': known are y"),
        (ValueError("another"), "another"),
    ],
)
def test_an_error_names_the_option_that_filled_its_field(error: ValueError, message: str) -> None:
    with pytest.raises(type(error)) as caught, naming_options(OPTIONS):
        raise error

    assert str(caught.value) == message
