"""Every argument of SGLang's names an engine's pages, but for those that are listed with the reason."""

import ast
import dataclasses
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from kvtier.engines.sglang.named_arguments import (
    CONDITIONS,
    EXCLUDED,
    LENGTH,
    SEED,
    canonical,
    name_arguments,
)

CONFIG = {"model_type": "llama", "rope_scaling": {"factor": 2.0, "rope_type": "linear"}}


def fields_of_the_release() -> Iterator[str]:
    """Yield the arguments of the release that is there, from its sources: importing them needs all of its libraries."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)), "srt", "arg_groups", "fields")
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield from (
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                )


FIELDS = tuple(fields_of_the_release())


def engine_with(**changes: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**(dict.fromkeys(FIELDS) | changes))


def name_of(**changes: object) -> str:
    words, unstable = name_arguments(engine_with(**changes), CONFIG)
    assert not unstable
    return json.dumps(words, sort_keys=True)


def test_each_argument_changes_the_name_unless_it_is_listed() -> None:
    base = name_of()
    assert len(FIELDS) > 500, "the release's arguments were not found"
    kept = [name for name in FIELDS if name not in EXCLUDED and name not in CONDITIONS]
    assert [name for name in kept if name_of(**{name: "another"}) == base] == []
    assert [name for name in FIELDS if name not in kept and name_of(**{name: "another"}) != base] == []
    assert len(kept) > 150


def test_each_listed_argument_exists() -> None:
    assert set(EXCLUDED) | set(CONDITIONS) <= set(FIELDS)
    assert not set(EXCLUDED) & set(CONDITIONS)


@pytest.mark.parametrize(
    "name",
    [
        "json_model_override_args", "kv_cache_dtype", "quantization", "attention_backend", "load_format", "model_impl",
        "mm_process_config", "image_processor_backend", "disable_fast_image_processor", "model_loader_extra_config",
        "speculative_draft_kv_cache_dtype", "enable_quant_communications", "forward_hooks", "dtype", "device",
    ],
)  # fmt: skip
def test_what_is_known_to_change_pages_is_never_listed(name: str) -> None:
    assert name in FIELDS
    assert name not in EXCLUDED


def test_an_argument_that_a_later_release_adds_is_part_of_the_name() -> None:
    assert name_of(kv_rotation="hadamard") != name_of()


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "su"])
def test_the_length_counts_where_ropes_factors_depend_on_it(rope: str) -> None:
    def words(config: object, **changes: object) -> dict[str, object]:
        return name_arguments(engine_with(context_length=8192, **changes), config).words

    assert LENGTH in words(CONFIG | {"rope_scaling": {"type": rope}})
    assert LENGTH in words({}), "of an unknown model it is not known"
    assert LENGTH in words(CONFIG, json_model_override_args='{"rope_scaling": {"type": "x"}}')
    assert LENGTH not in words(CONFIG)


def test_the_seed_counts_with_random_weights() -> None:
    assert name_of(random_seed=1) == name_of(random_seed=2)
    for load_format in ("dummy", "LoadFormat.DUMMY"):
        assert name_of(load_format=load_format, random_seed=1) != name_of(
            load_format=load_format, random_seed=2
        )
    assert SEED in CONDITIONS


class Kind(str, Enum):  # noqa: UP042  # as engines have them
    """A value that is text and an enum."""

    A = "a"


@dataclasses.dataclass
class Part:
    """A structure in an argument."""

    sizes: frozenset[str]


def test_values_have_one_form_in_every_process() -> None:
    value = {"b": {"x", "y", "z"}, "a": (torch.float16, Kind.A, Part(frozenset({"q", "r"})), Part)}
    expected = json.dumps(canonical(value))
    code = (
        "import json, torch; from tests.engines.sglang.test_named_arguments import *; "
        "print(json.dumps(canonical({'a': (torch.float16, Kind.A, Part(frozenset({'r', 'q'})), Part), "
        "'b': {'z', 'y', 'x'}})))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected
    assert "0x" not in expected


def test_a_value_without_a_form_is_named_and_not_described() -> None:
    words, unstable = name_arguments(engine_with(forward_hooks=[lambda: None]), CONFIG)
    assert unstable == ("forward_hooks",)
    assert "forward_hooks" not in words


def test_no_credential_is_in_the_name() -> None:
    held = [name for name in FIELDS if any(word in name for word in ("_key", "password", "_url", "keyfile"))]
    assert {"api_key", "admin_api_key", "ssl_keyfile_password", "encoder_urls"} <= set(held)
    assert [name for name in held if name not in EXCLUDED] == []
