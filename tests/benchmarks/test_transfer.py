"""The transfer suite lets each way to copy take part that the device has, the plain copy beside them."""

import pytest
import torch

from benchmarks import transfer
from benchmarks.harness.measurement import FLOOR, OURS
from benchmarks.harness.rounds import fixed
from kvtier.config import CudaCopier

ROW_BYTES = 8192
WAYS = {way.value for way in CudaCopier if way is not CudaCopier.AUTO}


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def test_each_way_that_is_there_takes_part_and_the_others_are_named(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "TOTAL_BYTES", 8 * ROW_BYTES)
    notes: list[str] = []
    shape = transfer.Shape(device, ROW_BYTES, num_layers=2, is_scattered=True)

    measured = list(transfer.measure_shape(shape, fixed(2), notes.append))

    assert [one.labels["operation"] for one in measured] == ["store", "load"]
    missing = {way for way in WAYS if any(f"cuda_copier={way!r}" in note for note in notes)}
    expected = {OURS, FLOOR} | (WAYS - missing if device == "cuda" else set())
    assert all(set(one.values) == expected for one in measured)
