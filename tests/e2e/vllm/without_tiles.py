"""Engines compute as on a processor without AMX tiles, so that the tests prove the same on every machine.

With tiles vLLM 0.32 adds in another order for one request than for a batch: answers in 16-bit types then differ by more
than what the tests tell apart. Importing this module switches tiles off in a process, unless ``KVTIER_TEST_TILES`` is
set: what one release stores with tiles is compared with another's, one request at a time.
"""

import os

import torch

if not os.environ.get("KVTIER_TEST_TILES"):
    torch.cpu._is_amx_tile_supported = lambda: False


class WithoutTiles:
    """An extension of vLLM's workers that adds nothing: a worker in a process of its own imports this module for it."""
