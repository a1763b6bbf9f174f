"""The KV caches of well-known models, from the table ``models.toml`` that comes with kvtier.

A name is found with or without the owner before the slash, in any case, and with the endings that fine-tuned
variants have (``-Instruct``, ``-it``, ``-Chat``, ``-Base``): these have the same KV cache.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.input_files import is_dir, is_there
from kvtier.sim.model_shape import ModelShape, read_shape, shape_of_config

CONFIG_FILE = "config.json"

VARIANT = re.compile(r"-(instruct|it|chat|base)$")
"""Endings of names that do not change the KV cache."""


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and the size of its keys and values.

    Attributes:
        name: the name in the table, or the path that the user gave.
        shape: its KV cache.
    """

    name: str
    shape: ModelShape


def list_models(kv_dtype: str | None = None) -> tuple[SizedModel, ...]:
    """Return every model of the table, in its order. Pure.

    Args:
        kv_dtype: type of keys and values if it differs from the models', for example "fp8".

    Raises:
        ConfigError: the type is unknown.
    """
    return tuple(
        SizedModel(name, shape_of_config(config, kv_dtype)) for name, config in _read_table().items()
    )


def find_model(model: str, kv_dtype: str | None = None) -> SizedModel:
    """Return the model that a user names.

    Args:
        model: a ``config.json``, a folder that has one, or a name of the table.
        kv_dtype: type of keys and values if it differs from the model's, for example "fp8".

    Raises:
        ConfigError: the file cannot be read or describes no supported KV cache, or the type is unknown.
        UnknownNameError: there is no such file, and no such name in the table.
    """
    path = Path(model)
    if is_dir(path):
        path /= CONFIG_FILE
        if not path.exists():
            raise ConfigError("MODEL", model, f"is a folder without {CONFIG_FILE}: give a model's folder")
    if is_there(path):
        return SizedModel(model, read_shape(path, kv_dtype))
    table = _read_table()
    name = {_normalise(known): known for known in table}.get(_normalise(model))
    if name is None:
        names = [known.rpartition("/")[2] for known in table]
        also = f"or give the path of its {CONFIG_FILE}"
        raise UnknownNameError("model", model.rpartition("/")[2], names, also=also)
    return SizedModel(name, shape_of_config(table[name], kv_dtype))


@cache
def _read_table() -> dict[str, dict[str, object]]:
    text = resources.files("kvtier.sim").joinpath("models.toml").read_text(encoding="utf-8")
    return {entry["name"]: entry["config"] for entry in tomllib.loads(text)["model"]}


def _normalise(name: str) -> str:
    return VARIANT.sub("", name.rpartition("/")[2].lower())
