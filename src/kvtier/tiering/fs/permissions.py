"""Links in a tier's directory, which lead out of what is counted."""

import os

from kvtier.base import OffloadKey
from kvtier.tiering.fs.folders import FSNamespace


def find_link(namespace: FSNamespace, key: OffloadKey) -> str | None:
    """Return the folder above a block that is a symbolic link, None when none is; looks once a second at most.

    What is behind a link is not counted, so blocks that are stored there would not be bounded by the capacity.
    """
    prefix = namespace.folder_prefix(key)
    if prefix in namespace.unlinked_folders:
        return None
    leaf = namespace.block_path(key).rpartition("/")[0]
    for folder in (namespace.path, leaf.rpartition("/")[0], leaf):
        if os.path.islink(folder):  # noqa: PTH114 - beside others, as text
            return folder
    namespace.unlinked_folders.add(prefix)
    return None
