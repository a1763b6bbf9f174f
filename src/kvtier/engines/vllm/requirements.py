"""Refuses to go on without vLLM, in one line that names the extra."""

from kvtier.errors import MissingExtraError

try:
    import vllm  # noqa: F401 - whether it is there is the question
except ImportError as error:
    raise MissingExtraError(error.name or "vllm", "vllm") from error
