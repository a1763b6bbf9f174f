"""Which adapter's weights made the blocks of a request.

It loads no weights. vLLM's content hashes know an adapter by its name and, from 0.31, its path, and either may stand
for other weights tomorrow, in this process or in the next one that reads the same disk. So the keys of such a
request are salted with a fingerprint of the adapter's files; one whose adapter has no readable files is not offloaded.
"""

import hashlib
import logging
from pathlib import Path

from vllm.v1.request import Request

from kvtier.engines.vllm.identity import fingerprint_checkpoint

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file of an adapter; while it is equal the files are taken for unchanged."""

NO_SALT = b""
"""The salt of a request without an adapter."""

CONFIG_NAME = "adapter_config.json"
"""Holds the scaling of the adapter, which changes its effect without changing a weight."""


class AdapterSalts:
    """Fingerprints each adapter once, when a request first names it; one whose files change afterwards is given up.

    vLLM may go on with the weights it has in memory, or read the new ones when it likes: it does not say which, so
    from then on nobody knows what a block of that adapter holds. The next start of the engine does.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Signature, bytes]] = {}
        self._refused: set[str] = set()

    def salt_of(self, request: Request) -> bytes | None:
        """Return the salt of a request's keys; None when its blocks must not be offloaded.

        Args:
            request: one of vLLM's.
        """
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return NO_SALT
        path = str(adapter.lora_path)
        if path in self._refused:
            return None
        try:
            return self._salt_at(path)
        except OSError as error:
            self._refused.add(path)
            logger.warning("from here on no request of adapter %r is offloaded: %s", path, error)
            return None

    def _salt_at(self, path: str) -> bytes:
        """Return the salt of an adapter whose files are what they were when they were first seen."""
        folder = Path(path)
        signature = tuple(sorted(_describe(file) for file in folder.iterdir() if file.is_file()))
        if path not in self._known:
            self._known[path] = signature, _fingerprint(folder)
        first_signature, salt = self._known[path]
        if signature != first_signature:
            raise FileExistsError(f"its files have changed while the engine runs ({folder})")
        return salt


def _fingerprint(folder: Path) -> bytes:
    weights = fingerprint_checkpoint(folder)
    if not weights:
        raise FileNotFoundError(f"{folder} holds no weights")
    settings = (folder / CONFIG_NAME).read_bytes() if (folder / CONFIG_NAME).exists() else b""
    return hashlib.sha256(weights.encode() + b"\0" + settings).digest()


def _describe(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns
