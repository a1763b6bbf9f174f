"""Makes the model that the demo talks to: random weights of the Llama architecture, or a local one.

Tokens are bytes, whatever the model's own tokenizer says: the demo measures time and compares answers, it does not
read them.
"""

from pathlib import Path

from kvtier.cli.demo.options import ModelOptions
from kvtier.engines.transformers.local_model import PreTrainedModel, load_local_model
from kvtier.engines.transformers.random_llama import NUM_BYTE_TOKENS, make_random_llama


def build_model(options: ModelOptions) -> PreTrainedModel:
    """Return the model, in evaluation mode on the CPU; equal options give equal weights.

    Raises:
        ModelError: there is no model of transformers at the path, or it has fewer tokens than there are bytes.
    """
    if options.path is None:
        return make_random_llama(options.num_layers, options.hidden_size, options.seed)
    return load_local_model(Path(options.path), min_vocabulary_size=NUM_BYTE_TOKENS)
