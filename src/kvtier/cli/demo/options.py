"""The options of ``kvtier demo``, checked before anything slow begins.

They cross to the process that shows the restart as JSON.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from kvtier.cli.option_names import naming_options
from kvtier.cli.simulate.options import parse_value
from kvtier.errors import ConfigError
from kvtier.input_files import is_dir
from kvtier.tiering.factory import TIER, TIERS

MAX_NUMBER = 1_000_000
"""The most of anything in a demo: prompts are made before they are served, and a million would take a day."""

TIER_TYPES = ("fs", "slab", "obj", "valkey", "mooncake")
"""Secondary tiers for which the demo has its own location; for others see ``kvtier.cli.demo.backends``."""

TIER_SETTING_FORM = "NAME=VALUE such as max_blocks=5000"

HIDDEN_SIZE_STEP = 256
"""The random model has four attention heads of 64 for each head of keys and values."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model to serve.

    Attributes:
        path: a local model; None: a random model of the Llama architecture, from the other values.
        num_layers: layers of the random model.
        hidden_size: width of the random model.
        seed: seed of the random model's weights.
    """

    path: str | None
    num_layers: int
    hidden_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.path is not None and not is_dir(Path(self.path)):
            raise ConfigError("--model", self.path, "must be a directory with a model of transformers")
        require_at_least("--layers", self.num_layers, 1)
        require_at_least("--seed", self.seed, 0)
        if self.hidden_size < 1 or self.hidden_size % HIDDEN_SIZE_STEP:
            raise ConfigError("--hidden", self.hidden_size, f"must be a multiple of {HIDDEN_SIZE_STEP}")


@dataclass(frozen=True, slots=True)
class DevicePoolOptions:
    """How much memory each level gets.

    Attributes:
        num_device_blocks: blocks of the device pool, the same with kvtier and without.
        cpu_bytes: host memory behind it.
        tier: the secondary tier behind that, as ``type`` in a configuration names it.
    """

    num_device_blocks: int
    cpu_bytes: int
    tier: str

    def __post_init__(self) -> None:
        require_at_least("--device-blocks", self.num_device_blocks, 1)
        if self.tier not in TIER_TYPES:
            with naming_options({TIER: "--tier"}):
                TIERS.resolve(self.tier)


@dataclass(frozen=True, slots=True)
class SetUp:
    """Everything that both processes of the demo must have in common.

    Attributes:
        model: the model to serve.
        pools: how much memory each level gets.
        tier_settings: settings of the secondary tier, its location included, as JSON.
    """

    model: ModelOptions
    pools: DevicePoolOptions
    tier_settings: Mapping[str, Any]  # Any: JSON

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the values as JSON objects."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:  # Any: JSON
        """Return the set-up from the output of ``to_json``.

        Raises:
            ConfigError: a value is not valid.
        """
        model, pools = ModelOptions(**values["model"]), DevicePoolOptions(**values["pools"])
        return cls(model, pools, values["tier_settings"])


def parse_tier_settings(texts: Iterable[str]) -> dict[str, Any]:  # Any: the tier gives them types
    """Return the settings that ``texts`` give, each in the form TIER_SETTING_FORM.

    Raises:
        ConfigError: the form is wrong, or a setting is given twice.
    """
    found: dict[str, Any] = {}  # Any: as above
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise ConfigError("--tier-setting", text, f"must be {TIER_SETTING_FORM}")
        if name in found or name == "type":
            remedy = "is set by --tier" if name == "type" else "is given twice: give it once"
            raise ConfigError("--tier-setting", text, remedy)
        found[name] = parse_value(value)
    return found


def require_at_least(option: str, value: int, minimum: int) -> None:
    """Refuse a number below ``minimum`` or beyond ``MAX_NUMBER``.

    Raises:
        ConfigError: it is.
    """
    if value < minimum:
        raise ConfigError(option, value, f"must be at least {minimum}")
    if value > MAX_NUMBER:
        raise ConfigError(option, value, f"must be at most {MAX_NUMBER}")


def require_new_file(option: str, path: Path | None) -> None:
    """Refuse a path that could not be written at the end of the demo.

    Raises:
        ConfigError: its directory does not exist, or the path is a directory.
    """
    if path is not None and (is_dir(path) or not is_dir(path.absolute().parent)):
        raise ConfigError(option, str(path), "must be a file in an existing directory")
