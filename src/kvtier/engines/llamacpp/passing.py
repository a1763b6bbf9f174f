"""How a request is passed on to llama-server, and its answer back: byte for byte, as it comes."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kvtier.engines.llamacpp.server import LlamaServer
from kvtier.errors import LlamaServerError

HOP_HEADERS = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "host",
        "expect",
    )
)
"""Headers that are about one connection."""

REQUEST_HEADERS = HOP_HEADERS | {"content-length", "content-encoding"}
"""Headers that are made anew for the request that is passed on, whose body may have a slot's number more."""


class BrokenAnswerError(ConnectionResetError):
    """The server's answer ended too soon; what came of it was passed on."""


async def pass_on(server: LlamaServer, request: web.Request, body: bytes) -> web.StreamResponse:
    """Pass a request on, and its answer back.

    Args:
        server: where to.
        request: the client's.
        body: what to send in place of its body.

    Raises:
        LlamaServerError: the server does not answer; nothing was sent to the client.
        BrokenAnswerError: its answer ended too soon; the client's connection is closed.
    """
    headers = [
        (name, value) for name, value in request.headers.items() if name.lower() not in REQUEST_HEADERS
    ]
    url = server.url + request.raw_path
    response: web.StreamResponse | None = None
    try:
        async with server.session.request(
            request.method,
            url,
            data=body or None,
            headers=headers,
            auto_decompress=False,
            allow_redirects=False,
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
            for name, value in upstream.headers.items():
                if name.lower() not in HOP_HEADERS:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
    except (aiohttp.ClientError, TimeoutError) as error:
        if response is None or not response.prepared:
            raise LlamaServerError(f"llama-server does not answer: {error}") from error
        # The client must see that its answer is not whole.
        if request.transport is not None:
            request.transport.abort()
        raise BrokenAnswerError(str(error)) from error


def read_fields(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a request; None where it has none. Pure."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def is_single(fields: Mapping[str, Any]) -> bool:
    """Return whether a request is one completion in a slot of the server's choice. Pure."""
    counts = (fields.get("n", 1), fields.get("n_cmpl", 1))
    return all(count in (1, None) for count in counts) and fields.get("id_slot", -1) in (-1, None)


def add_slot(body: bytes, fields: Mapping[str, Any], number: int) -> bytes:
    """Return the body of a request with the number of its slot; the rest stays as the client wrote it. Pure."""
    if "id_slot" in fields:
        return json.dumps({**fields, "id_slot": number}).encode()
    begin = body.index(b"{") + 1
    comma = b"," if fields else b""
    return body[:begin] + b'"id_slot":%d' % number + comma + body[begin:]
