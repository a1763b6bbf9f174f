"""Host pools of SGLang's on the CPU: small ones, whose pages are reached by the wheel's own functions.

The modules of SGLang's host pools import CUDA kernels, so they cannot be imported here. The functions that say where a
page's bytes are, and that copy pages, need torch alone: they are compiled from the wheel's source, without annotations.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

PAGE_FUNCTIONS = (
    "get_page_buffer_meta", "get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page",
    "_storage_page_index",
)  # fmt: skip


class SmallPool:
    """What every host pool has.

    Args:
        layout: SGLang's name of the order of bytes.
        num_pages: pages in it.
        page_size: slots of a page.
        dtype: of keys and values.
    """

    def __init__(self, layout: str, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.layout = layout
        self.page_size = self.logical_page_size = page_size
        self.size = num_pages * page_size
        self.dcp_size = 1
        self.dtype = dtype
        self.device = "cpu"
        self.pin_memory = False
        self.start_layer = 0

    def __getattr__(self, name: str) -> Any:  # Any: a function of the wheel's
        if name in PAGE_FUNCTIONS:
            found = functions_of(*self.SOURCE)[name]
            return lambda *args, **others: found(self, *args, **others)
        raise AttributeError(name)

    SOURCE = ("", "")

    def fill(self, seed: int) -> None:
        """Fill the pool with bytes of chance."""
        generator = torch.Generator().manual_seed(seed)
        flat = self.kv_buffer.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))

    def page(self, number: int) -> bytes:
        """Return the bytes of a page in the order of ``get_data_page``."""
        flat = self.get_data_page(number * self.page_size, flat=True)
        return bytes(flat.contiguous().view(torch.uint8).numpy())

    def slots(self, *numbers: int) -> torch.Tensor:
        """Return the slots of some pages, as SGLang names them."""
        size = self.page_size
        return torch.cat([torch.arange(number * size, (number + 1) * size) for number in numbers])


class HeadsPool(SmallPool):
    """A pool of keys and values with heads: ``MHATokenToKVPoolHost``."""

    SOURCE = ("mha", "MHATokenToKVPoolHost")

    def __init__(
        self,
        layout: str = "page_first",
        num_pages: int = 16,
        page_size: int = 4,
        *,
        heads: int = 2,
        dim: int = 8,
        layers: int = 3,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(layout, num_pages, page_size, dtype)
        self.head_num, self.head_dim, self.layer_num, self.end_layer = heads, dim, layers, layers
        shapes = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, num_pages, layers, page_size, heads, dim),
            "page_head": (2, num_pages, heads, page_size, layers, dim),
        }
        self.kv_buffer = torch.zeros(shapes[layout], dtype=dtype)


class LatentPool(SmallPool):
    """A pool of latents that every rank has alike: ``MLATokenToKVPoolHost``."""

    SOURCE = ("mla", "MLATokenToKVPoolHost")

    def __init__(
        self,
        layout: str = "page_first",
        num_pages: int = 16,
        page_size: int = 4,
        *,
        dim: int = 16,
        layers: int = 3,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(layout, num_pages, page_size, dtype)
        self.kv_cache_dim, self.layer_num, self.end_layer = dim, layers, layers
        self.layer_dim = dim
        shapes = {
            "layer_first": (layers, self.size, 1, dim),
            "page_first": (self.size, layers, 1, dim),
            "page_first_direct": (num_pages, layers, page_size, 1, dim),
        }
        self.kv_buffer = torch.zeros(shapes[layout], dtype=dtype)


class AnchorPool:
    """A pool that only numbers pages: ``LogicalHostPool``."""

    def __init__(self, num_pages: int = 16, page_size: int = 4) -> None:
        self.size, self.page_size, self.layout = num_pages * page_size, page_size, "layer_first"
        self.dtype = torch.uint8
        self.kv_buffer = None
        self.size_per_token = 0


@cache
def functions_of(module: str, class_name: str) -> dict[str, FunctionType]:
    """Return the functions of a host pool's class that reach pages, compiled from the wheel's source."""
    return compile_from(f"sglang.srt.mem_cache.pool_host.{module}", class_name, PAGE_FUNCTIONS)


def compile_from(module: str, class_name: str, names: tuple[str, ...]) -> dict[str, FunctionType]:
    """Return functions of a class in a module that cannot be imported."""
    tree = ast.parse(source_of(module))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    chosen = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in names]
    text = "from __future__ import annotations\n" + "\n".join(map(ast.unparse, chosen))
    space: dict[str, Any] = {"torch": torch}  # Any: functions
    exec(compile(text, module, "exec"), space)  # noqa: S102 - of the wheel that is under test
    return {name: space[name] for name in names if name in space}


def source_of(module: str) -> str:
    """Return the source of a module of the wheel without importing it or its package."""
    package = importlib.util.find_spec("sglang.srt.mem_cache")
    assert package is not None, "SGLang's wheel is unpacked"
    (folder,) = list(package.submodule_search_locations or [])
    root = Path(folder).parent.parent.parent
    return Path(root, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
