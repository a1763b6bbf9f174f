"""The readable identity of the engine's blocks, in a file beside the slab.

Nothing reads it but people: whoever wonders why nothing is found after a restart compares two of them.
"""

import logging
import os
from pathlib import Path

from kvtier.namespace import Namespace

logger = logging.getLogger(__name__)

FILE_MODE = 0o600


def document_path(slab_path: Path) -> Path:
    """Return where the document of the slab at ``slab_path`` is. Pure."""
    return slab_path.with_name(f"{slab_path.name}.namespace.json")


def write_document(slab_path: Path, namespace: Namespace) -> None:
    """Replace the document beside a slab by that of ``namespace``; one that cannot be written is named in the log."""
    path = document_path(slab_path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
        )
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(namespace.document + "\n")
        temporary.replace(path)
    except OSError as error:
        logger.warning("tier slab: %s was not written: %s", path, error)
