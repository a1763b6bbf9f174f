"""Stands in for CUDA's runtime and for the kernel on CPU tensors: what they are told to copy is copied at once."""

import ctypes
import importlib.util
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

import kvtier.cpu.cuda

SUCCESS, INVALID_VALUE = 0, 1


class SourceOrder(IntEnum):
    """As the runtime numbers them."""

    cudaMemcpySrcAccessOrderInvalid = 0  # noqa: N815
    cudaMemcpySrcAccessOrderStream = 1  # noqa: N815


class CopyFlags(IntEnum):
    """As the runtime numbers them."""

    cudaMemcpyFlagPreferOverlapWithCompute = 1  # noqa: N815


class Attributes:
    """Refuses what cuda-python refuses: an order that is no member of its enum."""

    def __init__(self) -> None:
        self._order = SourceOrder.cudaMemcpySrcAccessOrderInvalid
        self.flags = 0

    @property
    def srcAccessOrder(self) -> SourceOrder:  # noqa: N802
        return self._order

    @srcAccessOrder.setter
    def srcAccessOrder(self, order: SourceOrder) -> None:  # noqa: N802
        assert isinstance(order, SourceOrder)
        self._order = order


class FakeBindings:
    """``cuda.bindings.runtime`` of either release.

    Args:
        release: 12 or 13.
        refused: number of the copy that is refused, those before it are made; None refuses none.
    """

    cudaMemcpyAttributes = Attributes  # noqa: N815
    cudaMemcpySrcAccessOrder = SourceOrder  # noqa: N815
    cudaMemcpyFlags = CopyFlags  # noqa: N815

    def __init__(self, release: int = 13, refused: int | None = None) -> None:
        self.release = release
        self.refused = refused
        self.num_calls = 0

    def cudaMemcpyBatchAsync(  # noqa: N802
        self,
        dsts: list[int],
        srcs: list[int],
        sizes: list[int],
        count: int,
        attrs: list[Attributes],
        attrs_idxs: list[int],
        num_attrs: int,
        stream: int,
        /,
    ) -> tuple[int, ...]:
        self.num_calls += 1
        for column in (dsts, srcs, sizes):
            assert isinstance(column, list)
            assert len(column) == count > 0
            assert all(type(number) is int for number in column)
        assert attrs_idxs == [0]
        assert len(attrs) == num_attrs == 1
        assert attrs[0].srcAccessOrder is SourceOrder.cudaMemcpySrcAccessOrderStream
        assert stream != 0
        for number, (destination, source, size) in enumerate(zip(dsts, srcs, sizes, strict=True)):
            assert size > 0
            if number == self.refused:
                return (INVALID_VALUE, number) if self.release == 12 else (INVALID_VALUE,)
            ctypes.memmove(destination, source, size)
        return (SUCCESS, 0) if self.release == 12 else (SUCCESS,)


class FakePinning:
    """Keeps a table of registrations.

    Args:
        refused: number of the registration that fails; None refuses none.
    """

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.undone: list[int] = []
        self.error = SUCCESS

    def register(self, address: int, num_bytes: int) -> int:
        if len(self.calls) == self.refused:
            self.error = INVALID_VALUE
            return self.error
        self.calls.append((address, num_bytes))
        self.registered[address] = num_bytes
        return SUCCESS

    def unregister(self, address: int) -> int:
        self.undone.append(address)
        return SUCCESS if self.registered.pop(address, None) is not None else INVALID_VALUE

    def clear_error(self) -> None:
        self.error = SUCCESS


def interpreted_kernel() -> Any:  # noqa: ANN401  # Triton has no types for a kernel
    """Return the kernel as Triton's interpreter runs it, or skip the test.

    It is loaded apart from the package's own module, which must compile where there is a device.
    """
    pytest.importorskip("triton", reason="Triton is not installed: the kernel's source is not run")
    path = Path(str(kvtier.cpu.cuda.__file__)).with_name("copy_kernel.py")
    spec = importlib.util.spec_from_file_location("interpreted_copy_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module.copy_pieces


class PlainKernel:
    """What the kernel is to do, in a few lines: the launcher's part is tested without Triton."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int]) -> "PlainKernel":
        self.num_programs = grid[0]
        return self

    def __call__(self, table: Any, num_pieces: int, **constants: int) -> None:  # noqa: ANN401  # a tensor
        # By memory, as a kernel reads it, whatever the strides say.
        flat: list[int] = table.as_strided((3 * num_pieces,), (1,)).tolist()
        columns = flat[:num_pieces], flat[num_pieces : 2 * num_pieces], flat[2 * num_pieces :]
        assert self.num_programs >= 1
        aligned = constants["ALIGNED_BYTES"]
        self.launches.append((num_pieces, aligned))
        for source, destination, size in zip(*columns, strict=True):
            assert source % aligned == destination % aligned == 0
            assert aligned < 16 or size % 16 == 0
            ctypes.memmove(destination, source, size)
