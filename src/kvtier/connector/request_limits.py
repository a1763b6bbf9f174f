"""How much of a request may be loaded and stored, by its client and by the settings.

A client says so in ``kv_transfer_params``:

- ``skip_load``, ``skip_store``: true for nothing at all;
- ``max_load_tokens``, ``max_store_tokens``: so many tokens from the beginning of the prompt, whole blocks of them.

The settings add two limits: with ``offload_prompt_only`` nothing beyond the prompt is stored, and of a tenant that is
not served nothing is loaded or stored.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtier.hints.values import MAX_LOGGED_CHARS
from kvtier.redaction import shorten

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How many tokens may be loaded and stored, by the client's hints and the settings.

    Attributes:
        max_load_tokens: tokens from this position on are not loaded; None sets no limit.
        max_store_tokens: tokens from this position on are not stored; None sets no limit.
    """

    max_load_tokens: int | None = None
    max_store_tokens: int | None = None

    def within_prompt(self, num_prompt_tokens: int) -> "RequestLimits":
        """Return the same limits with nothing stored beyond the prompt. Pure."""
        limit = num_prompt_tokens
        if self.max_store_tokens is not None:
            limit = min(limit, self.max_store_tokens)
        return replace(self, max_store_tokens=limit)


NO_LIMITS = RequestLimits()

NOTHING_ALLOWED = RequestLimits(0, 0)
"""Of a request whose tenant is not served."""


def parse_request_limits(params: Mapping[str, Any] | None) -> RequestLimits:  # Any: a client's JSON
    """Read the limits of one request; an invalid value is logged and ignored.

    A client's mistake must not end the engine, and no limit is always right, only slower or faster.
    """
    if not params:
        return NO_LIMITS
    return RequestLimits(_read_limit(params, "load"), _read_limit(params, "store"))


def _read_limit(params: Mapping[str, Any], direction: str) -> int | None:  # Any: a client's JSON
    if params.get(f"skip_{direction}") is True:
        return 0
    name = f"max_{direction}_tokens"
    value = params.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    logger.warning(
        "kv_transfer_params: %s=%s is ignored: give a whole number, zero or more",
        name,
        shorten(value, MAX_LOGGED_CHARS),
    )
    return None
