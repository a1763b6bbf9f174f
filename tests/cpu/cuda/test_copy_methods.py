"""What becomes of a batch that CUDA's runtime refuses, in either release of cuda-python; and whether it is there."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.cpu.cuda.fakes import FakeBindings

from kvtier.cpu.cuda.copy_methods import BatchLauncher, find_batch_bindings
from kvtier.cpu.cuda.descriptors import Spans
from kvtier.cpu.cuda.span_copier import Memories
from kvtier.errors import DeviceCopyError

SPANS = Spans(*(np.array(column) for column in ([0, 0], [0, 8], [8, 0], [4, 4])))


def launcher_of(bindings: FakeBindings, stream: int = 7) -> tuple[BatchLauncher, torch.Tensor, torch.Tensor]:
    pages, rows = torch.arange(16, dtype=torch.int8), torch.zeros(16, dtype=torch.int8)
    return BatchLauncher(Memories([pages], rows), bindings, lambda: stream), pages, rows


@pytest.mark.parametrize("release", [12, 13])
def test_spans_are_one_call(release: int) -> None:
    bindings = FakeBindings(release)
    launcher, _, rows = launcher_of(bindings)

    launcher.launch(SPANS, is_store=True)

    assert bindings.num_calls == 1
    assert rows.tolist()[:12] == [8, 9, 10, 11, 0, 0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(("release", "known"), [(12, 1), (13, None)])
def test_a_refusal_in_the_middle_is_an_error_that_says_what_is_known(release: int, known: int | None) -> None:
    launcher, _, _ = launcher_of(FakeBindings(release, refused=1))

    with pytest.raises(DeviceCopyError, match="cudaMemcpyBatchAsync refused one of 2 copies") as caught:
        launcher.launch(SPANS, is_store=False)

    assert caught.value.refused == known
    assert caught.value.code == 1


def test_the_default_stream_is_refused_before_the_call() -> None:
    bindings = FakeBindings()
    launcher, _, _ = launcher_of(bindings, stream=0)

    with pytest.raises(DeviceCopyError, match="the default stream"):
        launcher.launch(SPANS, is_store=True)

    assert bindings.num_calls == 0


@pytest.mark.parametrize(
    ("is_there", "has_call", "unusable_reason"),
    [(False, False, "cannot be imported"), (True, False, "older than CUDA 12.8"), (True, True, None)],
)
def test_bindings_that_cannot_be_used_are_found_out(
    is_there: bool, has_call: bool, unusable_reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("runtime")
    if has_call:
        vars(module)["cudaMemcpyBatchAsync"] = None
    for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
        monkeypatch.setitem(sys.modules, name, module if is_there else None)

    found, why = find_batch_bindings()

    assert (why is None) == (unusable_reason is None)
    assert unusable_reason is None or unusable_reason in str(why)
    assert (found is module) == has_call


def test_the_bindings_that_are_installed_take_the_arguments() -> None:
    bindings, unusable_reason = find_batch_bindings()
    if unusable_reason is not None:
        pytest.skip(unusable_reason)
    pages, rows = torch.arange(16, dtype=torch.int8), torch.zeros(16, dtype=torch.int8)
    launcher = BatchLauncher(Memories([pages], rows), bindings, lambda: 7)
    if torch.cuda.is_available():
        pytest.skip("there is a device: stream 7 is none of its streams")

    with pytest.raises(DeviceCopyError):
        launcher.launch(SPANS, is_store=True)
