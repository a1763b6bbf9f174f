"""What the master's page lists that serves its metrics: the names of all values, and their lengths.

Clients cannot list a store. Its page can, in one piece and without times.
"""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier.errors import TierError
from kvtier.tiering.mooncake.native import TIER_TYPE
from kvtier.tiering.mooncake.settings import MooncakeSettings

BATCH_NAMES = 200
"""Names whose lengths are asked for at once: they stand in the address of a page, some 100 bytes each."""

MAX_PAGE_BYTES = 2**30
"""A list of names that is longer is cut; ten million have less."""

PAGE_TIMEOUT_S = 30.0
"""Seconds for a page: a master with millions of names takes some for the list."""

_CAPACITY = re.compile(r"^master_total_capacity_bytes (\d+)", re.MULTILINE)


class MasterPage:
    """The page of a master.

    Args:
        settings: which store.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        host = settings.master.rpartition(":")[0]
        self._url = f"http://{host}:{settings.admin_port}"

    def list_names(self) -> list[str]:
        """Return the names of all values, foreign ones among them.

        Raises:
            TierError: the page does not answer.
        """
        return self._read("/get_all_keys").decode("utf-8", "replace").splitlines()

    def measure(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield names with the bytes that all their copies take; those that are gone by now are left out.

        Args:
            names: to ask for, without commas.

        Raises:
            TierError: as above, or the page is of another release.
        """
        for begin in range(0, len(names), BATCH_NAMES):
            yield from self._measure(names[begin : begin + BATCH_NAMES])

    def read_capacity_bytes(self) -> int | None:
        """Return how much memory all providers lend; None where the page does not say. Raises as above."""
        found = _CAPACITY.search(self._read("/metrics").decode("utf-8", "replace"))
        return int(found[1]) if found else None

    def _measure(self, names: Sequence[str]) -> list[tuple[str, int]]:
        query = urllib.parse.urlencode({"keys": ",".join(names)})
        try:
            found: Mapping[str, Any] = json.loads(self._read(f"/batch_query_keys?{query}"))["data"]
            return [
                (name, sum(int(copy["size_"]) for copy in found[name]["values"] or ()))
                for name in names
                if name in found and found[name]["ok"]
            ]
        except (ValueError, TypeError, KeyError) as error:
            text = f"{self._url} gives an answer of another release: {error!r}"
            raise TierError(TIER_TYPE, text) from error

    def _read(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(self._url + path, timeout=PAGE_TIMEOUT_S) as answer:  # noqa: S310 - http
                found: bytes = answer.read(MAX_PAGE_BYTES)
                return found
        except (OSError, ValueError) as error:
            remedy = (
                "is it running, and is admin_port its --metrics_port? As "
                '{"type": "mooncake", "master": "host:port", "admin_port": 9003}'
            )
            text = f"the master's page {self._url}, which lists what is stored, does not answer ({error}): {remedy}"
            raise TierError(TIER_TYPE, text) from error
