"""Loads a causal language model from a directory; it downloads nothing and runs no code that came with the model."""

from pathlib import Path

from kvtier.engines.transformers import requirements as requirements  # isort: skip
from transformers import AutoModelForCausalLM
from transformers import PreTrainedModel as PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvtier.errors import ModelError


def load_local_model(path: Path, min_vocabulary_size: int = 1) -> PreTrainedModel:
    """Return the model under ``path``, in evaluation mode on the CPU.

    Raises:
        ModelError: there is no causal language model that transformers can load, or it knows fewer tokens
            than ``min_vocabulary_size``.
    """
    # They were written for a download of minutes; here each would be a line in the middle of somebody's table.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers is partly typed
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{path} holds no causal model that transformers can load: {first_line}") from error
    if model.config.vocab_size < min_vocabulary_size:
        raise ModelError(
            f"the model in {path} knows {model.config.vocab_size} tokens: {min_vocabulary_size} are needed"
        )
    model.train(mode=False)
    return model
