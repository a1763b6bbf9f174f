"""What of a model object decides its keys and values: every attribute of every module, less a list with reasons.

An attribute is a fact with a name, ``model.layers.0.self_attn:scaling``, and a canonical value. Only facts that the
model's own class does not set are part of an identity: a second model of the same class and configuration is made
without memory for its weights, and the facts of both are compared. So another release of transformers, whose classes
have other attributes, keeps its blocks, and an adapter's scale or a replaced module is seen.

Every tensor that is reached is collected by name, also one that is neither parameter nor buffer. A value whose form
would differ in another process (a lock, a function typed into a console) makes the fact differ in each process.
"""

import contextlib
import functools
import hashlib
import inspect
import logging
import re
import sys
import sysconfig
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvtier.engines.transformers.rope import GROWING_TYPE, SWITCHING_TYPES

NAMES = "says where weights came from; their bytes are read"
PLACEMENT = "says on which device a module computes"
MADE = "says how the weights were made; the result is read"
ORDER = "another order of sums, as batching alone has"
RETURNED = "what a pass returns next to keys and values"
CHOSEN = "how the next token is chosen"

EXCLUDED_ATTRIBUTES: Mapping[str, str] = {
    "config": "described by itself, once",
    "generation_config": CHOSEN,
    "name_or_path": NAMES,
    "hf_device_map": PLACEMENT,
    "_hf_hook": PLACEMENT,
    "_old_forward": PLACEMENT,
    "_is_hf_initialized": MADE,
    "_weight_conversions": MADE,
    "hf_quantizer": MADE,
    "peft_config": "has an adapter's folder; what is in effect of it stands in the adapter's layers",
    "_hf_peft_config_loaded": "what is in effect of adapters stands in their layers",
    "_use_kernels": ORDER,
    "_compiled_call_impl": ORDER,
    "_compiled_call": ORDER,
    "_last_compile_config": ORDER,
}
"""Attributes of modules that do not change keys and values, with the reason."""

EXCLUDED_SETTINGS: Mapping[str, str] = {
    "transformers_version": "an upgrade keeps its blocks",
    "_name_or_path": NAMES,
    "name_or_path": NAMES,
    "_commit_hash": NAMES,
    "_post_init_done": "says that it is complete",
    "_output_attentions": RETURNED,
    "architectures": "the model's class is described by itself",
    "dtype": "that of each tensor is read",
    "torch_dtype": "that of each tensor is read",
    "initializer_range": MADE,
    "id2label": RETURNED,
    "label2id": RETURNED,
    "problem_type": RETURNED,
    "return_dict": RETURNED,
    "use_cache": RETURNED,
    "output_attentions": RETURNED,
    "output_hidden_states": RETURNED,
}
"""Settings of a model's configuration that do not change what it keeps of a prompt, with the reason."""

MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has. Parameters, buffers, children and hooks are read by themselves."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""What may change a module's input and output. Those of the backward pass do not compute keys."""

ROPE_STATE = re.compile(
    r"(?!(.*_)?original_)((.*_)?(long_)?inv_freq|(.*_)?max_seq_len_cached|attention_scaling)"
)
"""What a rotary module of transformers 5.24 (November 2026) changes itself, in each pass, where its frequencies depend
on the length. The configuration and the original frequencies say the same, and each range of lengths has its names."""

OWN_CODE = "transformers_modules"
"""The package in which transformers puts code that came with a model."""

MAX_DEPTH = 24
"""Levels of an attribute that are read; a configuration has about five."""

PROCESS_ID = uuid.uuid4().hex
"""Stands for values that mean nothing in another process."""

Words = None | bool | int | float | str | list["Words"] | dict[str, "Words"]
"""What JSON can say."""


@dataclass(slots=True)
class ModelFacts:
    """What was read of a model.

    Attributes:
        facts: canonical values by name.
        tensors: every tensor that was reached, by name.
        nameless: facts whose value has no form that another process would find again.
        own_code: modules of Python whose code is in files that are not an installed release's.
        typed_code: facts whose code is in no file.
    """

    facts: dict[str, Words] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    nameless: set[str] = field(default_factory=set)
    own_code: set[str] = field(default_factory=set)
    typed_code: set[str] = field(default_factory=set)

    def digest_own_code(self) -> str:
        """Return a digest of the code that came with the model or is the user's; empty where there is none."""
        if self.typed_code:
            return f"only in process {PROCESS_ID}"
        packages = {name.rpartition(".")[0] for name in self.own_code if name.partition(".")[0] == OWN_CODE}
        digests = []
        for name, module in sorted(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if path and (name in self.own_code or name.rpartition(".")[0] in packages):
                digests.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
        # Sorted by content: a script has another name where it is imported.
        return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest() if digests else ""


def read_facts(model: PreTrainedModel, unread: frozenset[str] = frozenset()) -> ModelFacts:
    """Read every fact of a model.

    Args:
        model: the model.
        unread: names of facts and tensors to leave out: those that the model's own passes change.
    """
    reader = _Reader(model, unread)
    for path, module in model.named_modules():
        reader.read_module(path, module)
    # Some ways to quantise have parts of a weight in the state alone.
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            reader.found.tensors.setdefault(name, value)
        else:
            reader.add(f"{name}:", value)
    for name in unread:
        reader.found.tensors.pop(name, None)
    return reader.found


def read_usual_facts(model: PreTrainedModel, unread: frozenset[str] = frozenset()) -> dict[str, Words]:
    """Return the facts of a new model of the same class and configuration; none where no such model can be made."""
    try:
        # What the making draws must not change the numbers that the user draws next.
        with torch.random.fork_rng(devices=[]), torch.device("meta"), _quiet():
            made = type(model)(deepcopy(model.config))
        made.train(mode=False)
        return read_facts(made, unread).facts
    except Exception:  # noqa: BLE001 - foreign: a class may want other arguments, or compute while it is made
        return {}


def find_departures(facts: Mapping[str, Words], usual: Mapping[str, Words]) -> dict[str, Words]:
    """Return the facts that a usual model does not have; one that only a usual model has is None. Pure."""
    names = facts.keys() | usual.keys()
    return {
        name: facts.get(name)
        for name in sorted(names)
        if name not in facts or name not in usual or facts[name] != usual[name]
    }


def read_settings(model: PreTrainedModel) -> tuple[dict[str, Words], set[str]]:
    """Return a model's effective configuration, less the excluded settings, and those that have no stable form."""
    reader = _Reader(model, frozenset())
    reader.name = "model.config"
    kind = type(model)
    settings: dict[str, Words] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    return settings | reader.describe_config(model.config), reader.found.nameless


def own_attributes(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of a module's attributes that may change what it computes."""
    changes_itself = rotates_by_length(module)
    for name in vars(module):
        if name in MODULE_INTERNALS or name in EXCLUDED_ATTRIBUTES:
            continue
        if name == "forward" and "_hf_hook" in vars(module):  # accelerate's, which moves inputs
            continue
        if not (changes_itself and ROPE_STATE.fullmatch(name)):
            yield name


def rotates_by_length(module: torch.nn.Module) -> bool:
    """Return whether a module is a rope whose frequencies depend on the length of the sequence."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(isinstance(kind, str) and (kind in SWITCHING_TYPES or GROWING_TYPE in kind) for kind in kinds)


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """Yield kind, name and tensor of a module's parameters and buffers, less those that its own passes change."""
    changes_itself = rotates_by_length(module)
    for kind in ("_parameters", "_buffers"):
        for name, tensor in vars(module)[kind].items():
            if not (changes_itself and ROPE_STATE.fullmatch(name)):
                yield kind, name, tensor


class _Reader:
    """Reads values into ``found``."""

    def __init__(self, model: PreTrainedModel, unread: frozenset[str]) -> None:
        self.found = ModelFacts()
        self.name = ""
        self._unread = unread
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._configs: dict[int, Words] = {}
        self._open: set[int] = set()
        self._num_inner = 0

    def read_module(self, path: str, module: torch.nn.Module) -> None:
        kind = type(module)
        self.add(f"{path}:", f"{kind.__module__}.{kind.__qualname__}")
        self._note_code(kind.__module__)
        self.add(f"{path}:training", module.training)
        for _, name, tensor in tensors_of(module):
            if tensor is not None:
                self.found.tensors[f"{path}.{name}" if path else name] = tensor
        for name in own_attributes(module):
            self.add(f"{path}:{name}", vars(module)[name])
        for kind_of_hook in HOOKS:
            hooks = getattr(module, kind_of_hook)
            if hooks:
                self.add(f"{path}:{kind_of_hook}", list(hooks.values()))
        config = vars(module).get("config")
        if path and config is not None:
            self.add(f"{path}:config", config)

    def add(self, name: str, value: object) -> None:
        if name not in self._unread:
            self.name, self._num_inner = name, 0
            self.found.facts[name] = self.canonical(value)

    def canonical(self, value: object, depth: int = 0) -> Words:
        """Return a value in words that any process would use."""
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
            return value
        if depth > MAX_DEPTH:
            return self._nameless(value)
        if id(value) in self._open:
            return "contains itself"
        if isinstance(value, torch.nn.Module) and id(value) in self._paths:
            return {"module": self._paths[id(value)]}
        self._open.add(id(value))
        try:
            return self._read_object(value, depth + 1)
        finally:
            self._open.discard(id(value))

    def _read_object(self, value: Any, depth: int) -> Words:  # noqa: ANN401  # Any: an attribute of any model
        read = functools.partial(self.canonical, depth=depth)
        match value:
            case torch.Tensor() | torch.device() | torch.dtype() | torch.layout() | torch.memory_format():
                return self._read_of_torch(value)
            case GenerationConfig():
                return {"excluded": CHOSEN}
            case PreTrainedConfig():
                if id(value) not in self._configs:
                    self._configs[id(value)] = self.describe_config(value)
                return self._configs[id(value)]
            case Enum():
                return [read(type(value)), value.name]
            case Mapping():
                # Of an ordered one too: a name means the same wherever it stands.
                return {"mapping": sorted(([read(key), read(item)] for key, item in value.items()), key=str)}
            case set() | frozenset():
                return {"set": sorted((read(item) for item in value), key=str)}
            case list() | tuple():
                return [read(item) for item in value]
            case bytes():
                return {"bytes": hashlib.sha256(value).hexdigest()}
        if inspect.isroutine(value) or isinstance(value, type | functools.partial):
            return self._read_code(value, read)
        return self._read_state(value, read)

    def _read_of_torch(self, value: object) -> Words:
        if isinstance(value, torch.Tensor):
            self._num_inner += 1
            self.found.tensors[f"{self.name}#{self._num_inner}"] = value
            return {"tensor": f"{value.dtype} {tuple(value.shape)}"}
        return {"device": PLACEMENT} if isinstance(value, torch.device) else {"value": str(value)}

    def _read_code(self, value: Any, read: Callable[[object], Words]) -> Words:  # noqa: ANN401  # Any: function or class
        if isinstance(value, functools.partial):
            return {"partial": [read(value.func), read(value.args), read(value.keywords)]}
        if inspect.ismethod(value):
            return {"method": [read(value.__func__), read(value.__self__)]}
        module = getattr(value, "__module__", None) or ""
        words: list[Words] = [f"{module}.{getattr(value, '__qualname__', '')}"]
        if inspect.isfunction(value):
            if self._note_code(module):
                words.append(value.__code__.co_firstlineno)
            cells = value.__closure__ or ()
            words += [read([cell.cell_contents for cell in cells]), read(value.__defaults__)]
        elif isinstance(value, type):
            self._note_code(module)
        return {"code": words}

    def _read_state(self, value: Any, read: Callable[[object], Words]) -> Words:  # noqa: ANN401  # Any: as above
        """Describe an object by what it would be made of again."""
        try:
            parts = value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 - foreign: what cannot be made again has no words
            return self._nameless(value)
        if isinstance(parts, str):
            return {"object": parts}
        make, arguments, *state = parts
        # The items of lists and mappings come as iterators.
        return {"object": [read(make), read(arguments), *[read(_listed(one)) for one in state]]}

    def describe_config(self, config: PreTrainedConfig) -> dict[str, Words]:
        """Return the settings of a configuration, and of those within, less the excluded ones."""
        own: dict[str, Words] = {"model_type": config.model_type}
        for name, value in vars(config).items():
            if name not in EXCLUDED_SETTINGS:
                # Each way to compute attention, or experts, rounds in its own way: "_attn_implementation_internal".
                own[name.removeprefix("_").removesuffix("_internal")] = self._settings(value)
        return own

    def _settings(self, value: object) -> Words:
        """Return a setting in the form of JSON where it has one, for people to read."""
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: self._settings(item) for key, item in value.items() if key not in EXCLUDED_SETTINGS}
        if isinstance(value, PreTrainedConfig):
            return self.describe_config(value)
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        return self.canonical(value)

    def _note_code(self, module: str) -> bool:
        """Note a module whose code is not that of an installed release; return whether it is such a one."""
        top = module.partition(".")[0]
        path = getattr(sys.modules.get(module), "__file__", None)
        if (
            (top in sys.stdlib_module_names and top != "__main__")
            or top == "torch"
            or (path and _is_installed(path))
        ):
            return False
        if path is None:
            self.found.typed_code.add(self.name)
        else:
            self.found.own_code.add(module)
        return True

    def _nameless(self, value: object) -> Words:
        self.found.nameless.add(self.name)
        return {"only in process": f"{PROCESS_ID}-{id(value)}"}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, Iterator) else value


@functools.cache
def _is_installed(path: str) -> bool:
    return any(part in {"site-packages", "dist-packages"} for part in Path(path).parts) or path.startswith(
        sysconfig.get_path("stdlib")
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of the model that is made to compare with: what its making warns of has been said of the model."""
    usual = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(usual)
