"""Without vLLM the adapter says in one line what to install."""

import importlib
import sys

import pytest

from kvtier.errors import MissingExtraError


def test_a_missing_vllm_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("kvtier.engines.vllm")]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(MissingExtraError, match=r"pip install '.\[vllm\]'"):
        importlib.import_module("kvtier.engines.vllm")
