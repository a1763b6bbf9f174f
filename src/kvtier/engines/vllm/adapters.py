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
"""Name, size and time of change of each file of an adapter; when it is equal the files are not read again."""

NO_SALT = b""
"""The salt of a request without an adapter."""

CONFIG_NAME = "adapter_config.json"
"""Holds the scaling of the adapter, which changes its effect without changing a weight."""


class AdapterSalts:
    """Fingerprints adapters; reads a folder again only after one of its files has changed."""

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
        try:
            return self._fingerprint(path)
        except OSError as error:
            if path not in self._refused:
                self._refused.add(path)
                logger.warning(
                    "requests of adapter %r are not offloaded: its files cannot be read here: %s", path, error
                )
            return None

    def _fingerprint(self, path: str) -> bytes:
        folder = Path(path)
        signature = tuple(sorted(_describe(file) for file in folder.iterdir() if file.is_file()))
        known = self._known.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        weights = fingerprint_checkpoint(folder)
        if not weights:
            raise FileNotFoundError(f"{path!r} holds no weights")
        settings = (folder / CONFIG_NAME).read_bytes() if (folder / CONFIG_NAME).exists() else b""
        digest = hashlib.sha256(weights.encode() + b"\0" + settings).digest()
        self._known[path] = (signature, digest)
        return digest


def _describe(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns
