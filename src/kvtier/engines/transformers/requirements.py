"""Refuses to go on without the libraries of the extra ``kvtier[transformers]``, in one line that names it."""

from kvtier.errors import MissingExtraError

try:
    import torch  # noqa: F401 - whether it is there is the question
    import transformers  # noqa: F401 - whether it is there is the question
except ImportError as error:
    raise MissingExtraError(error.name or "transformers", "transformers") from error
