"""The tokens of one request as they are generated, and its result when they are all there.

It computes nothing; each ``next`` lets the engine do as many steps as the next token needs.
"""

from collections.abc import Generator
from types import TracebackType
from typing import Self

from kvtier.engines.transformers.request import Request
from kvtier.engines.transformers.result import GenerationResult, make_result
from kvtier.errors import EngineStateError


class TokenStream:
    """An iterator over generated tokens. Used from the engine's thread.

    The request starts at the first ``next`` and has ended when its last token is handed out; ending it earlier
    is done by ``close``, by leaving its ``with`` block, or by dropping the stream.

    Args:
        request: filled by the engine.
        tokens: what the engine generates.
    """

    def __init__(self, request: Request, tokens: Generator[int, None, None]) -> None:
        self._request = request
        self._tokens = tokens

    @property
    def result(self) -> GenerationResult:
        """What the request has to say; of a request that was closed early, about the tokens it had.

        Raises:
            EngineStateError: the request has not ended.
        """
        if self._request.ended_s is None:
            name = self._request.request_id
            raise EngineStateError(
                f"request {name!r} has not ended: take all its tokens, or close the stream"
            )
        return make_result(self._request)

    def close(self) -> None:
        """End the request now and free its device blocks; idempotent."""
        self._tokens.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        return next(self._tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._request.ended_s is None else "ended"
        return f"TokenStream({self._request.request_id}: {len(self._request.output_ids)} tokens, {state})"
