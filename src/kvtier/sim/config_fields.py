"""The fields of a model's ``config.json``, checked where they are read, and the types that tensors may have."""

from collections.abc import Mapping
from typing import Any

from kvtier.errors import ConfigError

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

DTYPE_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

MAX_NUMBER = 2**31 - 1
"""The largest number of a field. Ten thousand times what models have; larger ones overflow where bytes are counted."""

MAX_LAYERS = 100_000
"""The most layers. A thousand times what models have; each of them is an entry of a list."""

GUIDE = "its bytes per token are not known: give a model with another config.json"
"""The remedy for a model whose configuration cannot be read: a size has no other way to be described."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields with the language model's part of a multimodal configuration."""


class ConfigFields:
    """The fields of a language model's part of a configuration.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:  # Any: JSON
        self._outer = config
        self._config = next(
            (config[part] for part in TEXT_PARTS if isinstance(config.get(part), dict)), config
        )

    def get(self, field: str) -> object:
        """Return a field's value; None where it is missing."""
        return self._config.get(field)

    def number(self, field: str, *aliases: str) -> int:
        """Return the positive integer under the first of these names that exists.

        Raises:
            ConfigError: there is none, or it is not a positive integer.
        """
        name = next((name for name in (field, *aliases) if self.get(name) is not None), None)
        if name is None:
            raise ConfigError(field, None, f"is missing in the config: {GUIDE}")
        return self.require_number(name, self.get(name))

    def num_layers(self) -> int:
        """Return the number of layers.

        Raises:
            ConfigError: there is none, or no model has so many.
        """
        fields = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        found = self.number(*fields)
        if found > MAX_LAYERS:
            raise ConfigError(fields[0], found, f"must be at most {MAX_LAYERS}: {GUIDE}")
        return found

    def require_number(self, field: str, value: object) -> int:
        """Return ``value``, which stands in ``field``, or raise ConfigError where it is none from 1 to MAX_NUMBER."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(field, value, f"must be an integer above zero: {GUIDE}")
        if value > MAX_NUMBER:
            raise ConfigError(field, value, f"must be at most {MAX_NUMBER}: {GUIDE}", max_value_chars=40)
        return value

    def numbers(self, field: str, value: object) -> list[int]:
        """Return ``value``, which stands in ``field``, or raise ConfigError where it is not a list of integers."""
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise ConfigError(field, value, f"must be a list of integers: {GUIDE}")
        return value

    def dtype(self) -> tuple[str, int]:
        """Return the type of the model's weights, which its cache has too, and its bytes.

        Raises:
            ConfigError: it is missing or unknown.
        """
        for config in (self._config, self._outer):
            for field in ("dtype", "torch_dtype"):
                if isinstance(config.get(field), str):
                    return parse_dtype(field, config[field])
        raise ConfigError("torch_dtype", None, "is missing in the config: give --dtype")


def parse_dtype(option: str, name: str) -> tuple[str, int]:
    """Return the full name of a dtype and its bytes. Pure.

    Raises:
        ConfigError: it is unknown.
    """
    full = DTYPE_ALIASES.get(name.lower(), name.lower()).removeprefix("torch.")
    if full not in DTYPE_BYTES:
        known = ", ".join((*DTYPE_BYTES, *DTYPE_ALIASES))
        raise ConfigError(option, name, f"must be one of {known}")
    return full, DTYPE_BYTES[full]
