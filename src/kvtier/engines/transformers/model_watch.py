"""Sees, once a request, whether a model may have changed since the last look; reads no weight.

The look compares what changes when weights do: the objects of modules and tensors, version counters and storages of
tensors, every plain attribute of a module (an adapter's scale, whether it is active or merged), hooks, and the
configuration. It takes about a microsecond for each module and each tensor.

Not seen are writes through ``.data`` and to tensors that were made in inference mode, which torch does not count, and
changes within an object that is neither a module nor a tensor nor a container.

Source: ``torch.Tensor._version`` counts the writes in place.
"""

import weakref
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedConfig, PreTrainedModel

from kvtier.engines.transformers.model_facts import EXCLUDED_SETTINGS, HOOKS, own_attributes, tensors_of

ALWAYS = ("training", *HOOKS)
"""Attributes that each module has and that are looked at like its own."""


class TensorLook:
    """What is remembered of a tensor to see whether it was written, moved or replaced; not the tensor itself.

    Args:
        tensor: any tensor; of one without a storage its object and version count.
    """

    __slots__ = ("_storage", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name
        # As long as it is referred to weakly, no other storage is made at its address.
        storage = _storage_of(tensor)
        self._storage = None if storage is None else StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_same(self, tensor: torch.Tensor | None) -> bool:
        """Return whether ``tensor`` is the one remembered, and unchanged as far as torch counts."""
        if tensor is None or self._tensor() is not tensor:
            return False
        storage = self._storage
        if storage is not None and tensor.untyped_storage()._cdata != storage.cdata:  # noqa: SLF001 - as above
            return False
        return self._version is None or tensor._version == self._version  # noqa: SLF001 - as above

    def is_unchanged(self) -> bool:
        """Return whether the tensor remembered exists and is unchanged."""
        return self.is_same(self._tensor())


class ModuleLook:
    """What is remembered of one module, without its children.

    Args:
        path: its name within the model.
        module: the module.
        unread: names of facts and tensors that are not looked at.
    """

    def __init__(self, path: str, module: torch.nn.Module, unread: frozenset[str]) -> None:
        self._path = path
        self._module = weakref.ref(module)
        self._kind = type(module)
        attributes = vars(module)
        self._num_attributes = len(attributes)
        self._names = (*ALWAYS, *(name for name in own_attributes(module) if f"{path}:{name}" not in unread))
        self._read = itemgetter(*self._names)
        self._values = tuple(_copy(value) for value in self._read(attributes))
        self._inner = [TensorLook(tensor) for value in self._values for tensor in _tensors_in(value)]
        self._num_tensors = len(attributes["_parameters"]) + len(attributes["_buffers"])
        self._tensors = [
            (kind, name, None if tensor is None else TensorLook(tensor))
            for kind, name, tensor in tensors_of(module)
            if _tensor_name(path, name) not in unread
        ]
        # Not the children themselves: a module that is replaced shall leave the memory at once.
        self._children = [*map(id, attributes["_modules"].values())]

    def has_changed(self) -> bool:
        """Return whether the module is another, or may compute something else than when it was remembered."""
        module = self._module()
        if module is None or type(module) is not self._kind:
            return True
        attributes = vars(module)
        if self._has_other_parts(attributes):
            return True
        try:
            if self._read(attributes) != self._values:
                return True
        except Exception:  # noqa: BLE001 - foreign: an attribute is gone, or another that cannot be compared is there
            return True
        for kind, name, look in self._tensors:
            tensor = attributes[kind].get(name)
            if (tensor is not None) if look is None else not look.is_same(tensor):
                return True
        return bool(self._inner) and not all(look.is_unchanged() for look in self._inner)

    def _has_other_parts(self, attributes: dict[str, Any]) -> bool:  # Any: attributes of any module
        children = attributes["_modules"]
        return (
            len(attributes) != self._num_attributes
            or len(children) != len(self._children)
            or (bool(children) and [*map(id, children.values())] != self._children)
            or len(attributes["_parameters"]) + len(attributes["_buffers"]) != self._num_tensors
        )

    def changed_names(self) -> Iterator[str]:
        """Yield the names of attributes and tensors that are not as they were remembered, new ones too."""
        module = self._module()
        if module is None:
            return
        attributes = vars(module)
        for name, before in zip(self._names, self._values, strict=True):
            if name not in attributes or _differs(attributes[name], before):
                yield f"{self._path}:{name}"
        yield from (f"{self._path}:{name}" for name in own_attributes(module) if name not in self._names)
        looks = {(kind, name): look for kind, name, look in self._tensors}
        for kind, name, tensor in tensors_of(module):
            look = looks.get((kind, name))
            if (tensor is not None) if look is None else not look.is_same(tensor):
                yield _tensor_name(self._path, name)


class ModelLook:
    """What is remembered of a model.

    Args:
        model: the model.
        unread: names of facts and tensors that are not looked at: those that the model's own passes change.
    """

    def __init__(self, model: PreTrainedModel, unread: frozenset[str] = frozenset()) -> None:
        self._model = model
        # Taken before anything is read, so that a change meanwhile is seen by the next look.
        self._modules = [ModuleLook(path, module, unread) for path, module in model.named_modules()]
        configs = {id(config): config for config in _configs_of(model)}
        self._configs = [(config, _settings(config)) for config in configs.values()]

    def has_changed(self) -> bool:
        """Return whether the model may compute something else than when it was remembered."""
        if any(look.has_changed() for look in self._modules):
            return True
        return any(_differs(_settings(config), settings) for config, settings in self._configs)

    def changed_names(self) -> frozenset[str]:
        """Return the names of attributes and tensors that are not as they were remembered."""
        return frozenset(name for look in self._modules for name in look.changed_names())


def _tensor_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # tensors of some quantisers have none
        return None


def _copy(value: object) -> object:
    """Return a value whose containers are copies, so that a change within them is seen."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, set):
        return set(value)
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _differs(value: object, before: object) -> bool:
    # In tuples, so that an object is compared with itself by identity, as a tensor cannot be compared.
    try:
        return bool((value,) != (before,))
    except Exception:  # noqa: BLE001 - foreign: another value of a kind that cannot be compared
        return True


def _configs_of(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Yield the configurations of a model and its modules, and those within."""
    open_configs = [vars(module).get("config") for module in model.modules()]
    while open_configs:
        config = open_configs.pop()
        if isinstance(config, PreTrainedConfig):
            yield config
            open_configs += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]


def _settings(config: PreTrainedConfig) -> object:
    return _copy({name: value for name, value in vars(config).items() if name not in EXCLUDED_SETTINGS})
