"""The files under deploy, read as what they are."""

import json
from pathlib import Path
from typing import Any

import yaml

from kvtier.config import parse_settings
from kvtier.settings import parse_settings as parse_own_settings
from kvtier.tiering.base import COMMON_SETTINGS, parse_tier_settings
from kvtier.tiering.factory import TIERS

FOLDER = Path(__file__).parents[2] / "deploy"

Document = dict[str, Any]  # Any: YAML


def read(name: str) -> Document:
    """Return the only document of a file under deploy."""
    document: Document = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return document


def read_all(name: str) -> list[Document]:
    """Return the documents of a file under deploy."""
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def require_settings(transfer_config: str) -> Document:
    """Return kvtier's settings out of what vLLM's flag takes, after kvtier and each tier have parsed them.

    Raises:
        KVTierError: a setting is unknown or cannot work.
    """
    config = json.loads(transfer_config)
    assert config["kv_connector"] == "KVTierConnector"
    assert config["kv_connector_module_path"] == "kvtier.engines.vllm"
    assert config["kv_role"] == "kv_both"
    settings: Document = config["kv_connector_extra_config"]
    for entry in parse_settings(settings).secondary_tiers:
        parse_tier_settings(entry)
        kind = TIERS.resolve(entry["type"]).own_settings
        assert kind is not None
        own = {name: value for name, value in entry.items() if name not in {"type", *COMMON_SETTINGS}}
        parse_own_settings(kind, own, entry["type"])
    return settings


def bytes_of(quantity: str) -> int:
    """Return a size of Kubernetes or compose in bytes: "18Gi", "6gb"."""
    units = {"gi": 2**30, "gib": 2**30, "g": 10**9, "gb": 2**30}
    number = quantity.rstrip("GiBgb")
    return int(number) * units[quantity[len(number) :].lower()]
