"""Settings of the embedded engine, checked at construction; ``kvtier.config`` parses ``extra_config``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.config import parse_settings
from kvtier.errors import ConfigError

DEFAULT_BLOCK_SIZE_TOKENS = 16
"""Tokens in a device block. Larger blocks transfer faster and share less; smaller ones cost more hashing and
bookkeeping for each token."""

DEFAULT_PREFILL_CHUNK_TOKENS = 512
"""Prompt tokens computed in one step. Larger chunks need more activation memory and start stores later;
smaller ones have slower matrix products."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the embedded engine.

    Attributes:
        num_device_blocks: blocks in the device pool; one request needs room for its prompt and its output.
        block_size_tokens: tokens in a device block; None takes 16, and for a model with recurrent states the interval.
        state_interval_tokens: recurrent states are kept after each multiple of so many tokens, a multiple of the block
            size; None takes as many as have keys and values of the size of the states, at least 256 and at most 1,024.
        extra_config: kvtier's own settings, for example ``{"cpu_bytes_to_use": "4GiB"}``; None switches
            offloading off, so that only the device's prefix cache remains.
        salt: mixed into every block hash; engines with different salts share nothing.
        prefill_chunk_tokens: prompt tokens computed in one step.
        model_name: name of the model in the namespace's document; None takes the one of the model's configuration. It
            decides what may be exchanged only with ``model_revision``.
        model_revision: name of the weights, which are not read then; None takes a SHA-256 over every weight.
        enable_events: whether the managers record stored and removed blocks.

    Raises:
        ConfigError: a value that cannot work.
        UnknownNameError: ``extra_config`` has an unknown setting.
    """

    num_device_blocks: int
    block_size_tokens: int | None = None
    extra_config: Mapping[str, Any] | None = field(default=None, repr=False)  # Any: as JSON has it
    salt: str = field(default="", repr=False)
    prefill_chunk_tokens: int = DEFAULT_PREFILL_CHUNK_TOKENS
    model_name: str | None = None
    model_revision: str | None = None
    enable_events: bool = False
    state_interval_tokens: int | None = None

    def __post_init__(self) -> None:
        parse_settings(self.extra_config or {})
        if not isinstance(self.salt, str):
            raise ConfigError("salt", self.salt, "must be a string")
        _require_positive("num_device_blocks", self.num_device_blocks)
        for setting in ("block_size_tokens", "state_interval_tokens"):
            if getattr(self, setting) is not None:
                _require_positive(setting, getattr(self, setting))
        _require_positive("prefill_chunk_tokens", self.prefill_chunk_tokens)


def _require_positive(setting: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(setting, value, "must be a whole number of at least 1")
