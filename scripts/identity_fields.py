"""Writes ``docs/results/identity-fields.md``: which fields of vLLM's configuration name an engine's blocks.

    PYTHONPATH=$PWD/src:$PWD .venv-vllm-0.32.0/bin/python -m scripts.identity_fields

Every field of the configuration of an engine with adapters, a draft model and images is listed: those that separate
two engines, and those that are excluded with the reason. Needs an environment with vLLM; no engine is started.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs

from kvtier.engines.vllm.named_fields import CONDITIONS, DRAFT_SECTIONS, EXCLUDED, NamedField, list_fields

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "identity-fields.md"
BEGIN, END = "<!-- made by scripts.identity_fields -->\n", "<!-- end -->\n"

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
"""What is in the ``config.json`` of a model whose configuration vLLM accepts."""


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    with tempfile.TemporaryDirectory() as folder:
        made = render(list(list_fields(make_config(Path(folder)))))
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


def make_config(folder: Path) -> VllmConfig:
    """Return the configuration of an engine that has every section whose fields are excluded one by one."""
    for name in ("model", "draft"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(TINY_LLAMA))
    config = EngineArgs(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=256,
        block_size=16,
        enable_lora=True,
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": 2,
        },
    ).create_engine_config()
    # A model with images needs more files than a configuration; only its section is of interest.
    config.model_config.multimodal_config = MultiModalConfig()
    return config


def render(fields: Sequence[NamedField]) -> str:
    """Return the page's part that is made. Pure."""
    drafts = tuple(DRAFT_SECTIONS)
    named = sorted(one.name for one in fields if not one.reason and not one.name.startswith(drafts))
    excluded = dict(sorted(EXCLUDED.items()))
    count = (
        f"vLLM {vllm.__version__}: {len(named)} fields separate two engines, {len(excluded)} are excluded."
    )
    return "\n".join([count, "", *_kept_lines(named), "", *_excluded_lines(excluded), ""])


def _kept_lines(names: Sequence[str]) -> Iterator[str]:
    yield "| section | fields that separate two engines |"
    yield "|---|---|"
    by_section: dict[str, list[str]] = {}
    for name in names:
        section, _, field = name.rpartition(".")
        by_section.setdefault(section, []).append(f"`{field}`")
    for section, fields in by_section.items():
        yield f"| {f'`{section}`' if section else ''} | {', '.join(fields)} |"


def _excluded_lines(excluded: dict[str, str]) -> Iterator[str]:
    yield "| because | excluded |"
    yield "|---|---|"
    by_reason: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        mark = " (not always)" if name in CONDITIONS else ""
        by_reason.setdefault(reason, []).append(f"`{name}`{mark}")
    for reason, names in by_reason.items():
        yield f"| {reason} | {', '.join(names)} |"


if __name__ == "__main__":
    main()
