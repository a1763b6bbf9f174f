"""What a living engine's workers have as weights, as far as vLLM's own calls tell it.

vLLM tells a connector nothing of weights, but every change of them comes through a call to its engine core: sleep of
level 2 discards them, ``reload_weights`` reads files, a weight transfer fills them from a trainer. In doubt weights are
unknown: a miss, not a wrong answer.

Source: ``Worker`` of vLLM 0.32; ``collective_rpc`` takes the names of its methods.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtier.engines.checkpoint import digest_buffers

HARMLESS_CALLS = frozenset(
    {
        "add_lora", "check_health", "compute_weight_checksums", "execute_dummy_batch", "get_model_inspection",
        "init_weight_transfer_engine", "list_loras", "pin_lora", "profile", "remove_lora", "reset_encoder_cache",
        "reset_mm_cache", "save_sharded_state", "shutdown_weight_transfer_engine", "sleep", "synchronize_device",
        "wake_up",
    }
)  # fmt: skip
"""Workers' methods of vLLM's own that leave the model's weights alone."""

BREAKING_CALLS = frozenset(
    {"reset_weights", "start_draft_weight_update", "start_weight_update", "update_config", "update_weights"}
)
"""Methods after which nothing is known of the weights, or of what is loaded next, until a call that finishes them."""

DISCARDING_LEVEL = 2
"""The level of sleep from which on weights do not come back by themselves."""


class Origin(Enum):
    """Where the weights come from that are loaded now."""

    START = "what the engine was started with"
    FILES = "files, read again"
    TRANSFER = "a transfer through vLLM's own loader"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that are loaded.

    Attributes:
        origin: where they come from.
        path: the folder that they were read from; empty for that of the engine's start.
    """

    origin: Origin
    path: str = ""


AS_STARTED = Weights(Origin.START)
UNKNOWN = Weights(Origin.UNKNOWN)


class LoadedWeights:
    """What is known of the weights, from one call of the engine core to the next. Used from the scheduler's thread.

    Attributes:
        now: the weights that are loaded.
        is_asleep: whether the device's memory is taken away.
        is_identified: whether the namespace in effect is that of ``now``.
        is_device_empty: whether the device's prefix cache has no block that other weights may have computed.
    """

    def __init__(self) -> None:
        self.now = AS_STARTED
        self.is_asleep = False
        self.is_identified = True
        self.is_device_empty = True
        self._path = ""
        self._is_draft = False
        self._is_configured_anew = False

    def on_sleep(self, level: int) -> None:
        """Follow the engine into sleep: from level 2 on the weights are gone."""
        self.is_asleep = True
        if level >= DISCARDING_LEVEL:
            self._change(UNKNOWN)

    def on_call(
        self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_failed: bool = False
    ) -> bool:  # Any: arguments of a user's call
        """Follow a call to all workers; return whether the weights may be others after it.

        A method that is not vLLM's own counts while the engine sleeps, when weights are exchanged. An engine that is
        awake takes it for harmless, as vLLM's own cache does.
        """
        if method in HARMLESS_CALLS:
            return False
        if method == "update_config":
            self._is_configured_anew = True
            return False
        if method == "reload_weights":
            self._change(UNKNOWN if has_failed else self._reloaded(self.path_of_reload(args, kwargs)))
        elif method == "finish_weight_update":
            is_known = not (has_failed or self._is_draft)
            self._change(Weights(Origin.TRANSFER) if is_known else UNKNOWN)
            self._is_draft = False
        elif method in BREAKING_CALLS or self.is_asleep:
            self._is_draft |= method == "start_draft_weight_update"
            self._change(UNKNOWN)
        else:
            return False
        return True

    def path_of_reload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:  # Any: as above
        """Return from where ``reload_weights`` with these arguments reads; None when it reads no files in this way."""
        given = dict(zip(("weights_iterator", "weights_path", "is_checkpoint_format"), args, strict=False))
        given |= kwargs
        if given.get("weights_iterator") is not None or not given.get("is_checkpoint_format", True):
            return None
        # Without a path vLLM reads what it has read last.
        path = given.get("weights_path")
        return self._path if path is None else str(path)

    def _reloaded(self, path: str | None) -> Weights:
        if path is None:
            return Weights(Origin.TRANSFER)
        self._path = path
        return Weights(Origin.TRANSFER if self._is_configured_anew else Origin.FILES, path)

    def _change(self, weights: Weights) -> None:
        self.now = weights
        self.is_identified = False


def digest_model(model: nn.Module) -> str:
    """Return a digest of a model's parameters and buffers in memory, on one worker; empty where it cannot see them all.

    A backend that packs weights for its own kernels leaves empty parameters behind.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    if any(one.is_meta or one.numel() == 0 or is_traceable_wrapper_subclass(one) for one in tensors.values()):
        return ""
    return digest_buffers(_describe_tensors(tensors))


def _describe_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    for name, tensor in tensors.items():
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode()
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
