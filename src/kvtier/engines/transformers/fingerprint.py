"""Identity of a model's weights and configuration, for the namespace of its blocks.

The fingerprint of the weights is a SHA-256 over name, dtype, shape and every byte of every tensor of the
model's state, so two models share one only when their weights are equal. It costs about a second per gigabyte
at start; whoever knows the revision of the weights gives ``model_revision`` and skips it.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

FINGERPRINT_THREADS = 4
"""Tensors hashed at once; hashing releases the interpreter's lock. More than the cores gains nothing."""

FINGERPRINT_PREFIX = "sha256-of-all-weights:"
"""Says how the revision was found, so that no fingerprint is taken for a revision that somebody named."""

UNRELATED_SETTINGS = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
"""Settings of a model's configuration that do not change what it computes."""


def fingerprint_weights(model: PreTrainedModel) -> str:
    """Return a digest that differs when any weight differs. Reads every byte of the model once."""
    names_and_tensors = sorted(model.state_dict().items())
    whole = hashlib.sha256()
    with ThreadPoolExecutor(FINGERPRINT_THREADS, "kvtier-fingerprint") as threads:
        digests = threads.map(_digest_tensor, (tensor for _, tensor in names_and_tensors))
        for (name, _), digest in zip(names_and_tensors, digests, strict=True):
            whole.update(name.encode() + b"\0" + digest)
    return FINGERPRINT_PREFIX + whole.hexdigest()


def digest_model_config(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the model's effective configuration as canonical JSON. Pure."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in UNRELATED_SETTINGS}
    canonical = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
