"""Events as vLLM 0.32 publishes them, and a publisher of them on a loopback socket."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

TOKEN = 987654321987654
"""A token id that stands in no log; too long to stand in a salted id by chance."""


def stored(hashes: list[int | bytes], parent: int | bytes | None = None, **more: object) -> dict[str, Any]:
    """Return the event of blocks of four tokens, with whatever else vLLM says in it."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [TOKEN] * 4 * len(hashes),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "secret-adapter",
        **more,
    }


def payload_of(number: int, rank: int | None = 0, num_events: int = 1) -> bytes:
    """Return a batch as vLLM 0.32 encodes it: a chain of blocks, two new ones each time."""
    hashes: list[int | bytes] = [2 * number + 2**63, 2 * number + 1 + 2**63]
    parent = 2 * number - 1 + 2**63 if number else None
    event = stored(hashes, parent, token_ids=[TOKEN] * 32, block_size=16, lora_name=None, group_idx=0)
    fields: list[Any] = [1.7e9 + number / 10, [event] * num_events]
    return bytes(msgspec.msgpack.encode(fields if rank is None else [*fields, rank]))


@contextmanager
def publishing(
    connect_to: str | None = None, junk: bytes | None = None, num_events: int = 1
) -> Iterator[str]:
    """Publish batches, numbered from 0, over and over until left; yields the endpoint."""
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    if connect_to is None:
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    else:
        socket.connect(connect_to)
        endpoint = connect_to
    has_ended = threading.Event()

    def publish() -> None:
        for number in itertools.count():
            if junk is not None:
                socket.send_multipart((b"", number.to_bytes(8, "big"), junk))
            socket.send_multipart((b"", number.to_bytes(8, "big"), payload_of(number, num_events=num_events)))
            if has_ended.wait(0.005):
                return

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield endpoint
    finally:
        has_ended.set()
        thread.join()
        context.destroy(linger=0)


def free_endpoint() -> str:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
