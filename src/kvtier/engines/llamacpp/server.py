"""The calls of llama-server that the front makes for itself, and the token ids of prompts.

Tokenizing costs tens of microseconds a token, so the ids of recent prompts are remembered by their text: of a next turn
only what is new is tokenized. Only a special token, such as the one that begins a message, is a place where a text may
be cut without other ids; where a model's texts have none, the whole text is tokenized.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvtier.errors import LlamaServerError

CHAT_PATHS = frozenset({"/v1/chat/completions", "/chat/completions"})
COMPLETION_PATHS = frozenset({"/completion", "/completions", "/v1/completions"})
INFILL_PATHS = frozenset({"/infill"})

MAX_REMEMBERED = 32
"""Prompts whose ids are remembered: as many conversations as a server has slots, and some more. 100 kB each."""

MIN_REMEMBERED_CHARS = 1000
"""A shorter text is tokenized in less than a millisecond."""

Json = Any  # Any: JSON of a server or client


@dataclass(frozen=True, slots=True)
class ServerSlot:
    """What the server says of one of its slots.

    Attributes:
        number: its id.
        num_tokens: tokens that it holds.
        task: number of its last task; a restarted server counts from 0 again.
        is_busy: whether it computes.
    """

    number: int
    num_tokens: int
    task: int
    is_busy: bool


class LlamaServer:
    """A llama-server. Used from one event loop.

    Args:
        session: for the calls.
        url: where it listens.
        api_key: what it wants as authorization; empty for nothing.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str = "") -> None:
        self.session, self.url = session, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._texts = PromptTexts()

    async def call(
        self, method: str, path: str, body: Json = None, *, headers: Mapping[str, str] | None = None
    ) -> Json:
        """Make a call and return the answer.

        Raises:
            LlamaServerError: the server cannot be reached, or refuses.
        """
        try:
            async with self.session.request(
                method, self.url + path, json=body, headers={**self._headers, **(headers or {})}
            ) as response:
                answer = await response.read()
            if response.status == 200:
                return json.loads(answer)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise LlamaServerError(f"llama-server does not answer {path}: {error}") from error
        text = answer[:300].decode(errors="replace")
        raise LlamaServerError(f"llama-server refuses {path} with status {response.status}: {text}")

    async def is_ready(self) -> bool:
        """Return whether the model is loaded."""
        try:
            await self.call("GET", "/health")
        except LlamaServerError:
            return False
        return True

    async def slots(self) -> dict[int, ServerSlot]:
        """Return the slots by number. The server answers this during a batch too."""
        return {
            slot["id"]: ServerSlot(
                slot["id"],
                slot.get("n_prompt_tokens") or 0,
                slot.get("id_task", -1),
                bool(slot["is_processing"]),
            )
            for slot in await self.call("GET", "/slots")
        }

    async def slot_action(self, number: int, action: str, file_name: str = "") -> Json:
        """Save, restore or erase a slot; waits for a running batch."""
        return await self.call("POST", f"/slots/{number}?action={action}", {"filename": file_name})

    async def prompt_tokens(
        self, path: str, body: Mapping[str, Json], headers: Mapping[str, str]
    ) -> list[int] | None:
        """Return the ids of a request's prompt; None where it is not one prompt of text or ids.

        Raises:
            LlamaServerError: the server refuses the prompt.
        """
        if path in CHAT_PATHS:
            prompt = (await self.call("POST", "/apply-template", body, headers=headers)).get("prompt")
        else:
            prompt = body.get("prompt")
        if isinstance(prompt, list):
            is_ids = bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)
            return prompt if is_ids else None
        return await self._tokenize_known(prompt, headers) if isinstance(prompt, str) else None

    async def tokenize(self, text: str, headers: Mapping[str, str] | None = None) -> list[int]:
        """Return the ids of a whole prompt."""
        pieces = await self._tokenize(text, headers or {}, is_begin=True)
        return [piece[0] for piece in pieces]

    async def _tokenize_known(self, text: str, headers: Mapping[str, str]) -> list[int]:
        ids, num_chars = self._texts.find(text)
        pieces = await self._tokenize(text[num_chars:], headers, is_begin=not num_chars)
        new = [piece[0] for piece in pieces]
        if len(text) >= MIN_REMEMBERED_CHARS:
            self._texts.add(text, ids, num_chars, pieces)
        return [*ids, *new]

    async def _tokenize(
        self, text: str, headers: Mapping[str, str], *, is_begin: bool
    ) -> "list[tuple[int, str]]":
        request = {"content": text, "add_special": is_begin, "parse_special": True, "with_pieces": True}
        answer = await self.call("POST", "/tokenize", request, headers=headers)
        # The piece of a part of a character is a list of bytes.
        return [
            (one["id"], one["piece"] if isinstance(one["piece"], str) else "") for one in answer["tokens"]
        ]


class PromptTexts:
    """The ids of recent prompts, up to each place where their text may be cut.

    A cut is before a special token, which no tokenizer joins with what stands before it.
    """

    def __init__(self) -> None:
        self._cuts: OrderedDict[str, tuple[list[int], list[tuple[int, int]]]] = OrderedDict()

    def find(self, text: str) -> tuple[list[int], int]:
        """Return the ids of the longest known beginning of a text that ends at a cut, and its characters."""
        best: tuple[list[int], int] = ([], 0)
        best_text = ""
        for known, (ids, cuts) in self._cuts.items():
            common = _common_chars(known, text)
            usable = [cut for cut in cuts if best[1] < cut[0] <= common]
            if usable:
                num_chars, num_ids = usable[-1]
                best, best_text = (ids[:num_ids], num_chars), known
        if best_text:
            self._cuts.move_to_end(best_text)
        return best

    def add(self, text: str, ids: Sequence[int], num_chars: int, pieces: "Sequence[tuple[int, str]]") -> None:
        """Remember a text: the ids of its known beginning, and the pieces of the rest."""
        cuts = next((cuts for _, cuts in self._cuts.values() if (num_chars, len(ids)) in cuts), [])
        cuts = [cut for cut in cuts if cut[0] <= num_chars]
        offset, all_ids = num_chars, list(ids)
        for token, piece in pieces:
            is_special = len(piece) > 3 and piece[0] in "<[" and piece[-1] in ">]"
            if is_special and offset and text.startswith(piece, offset):
                cuts.append((offset, len(all_ids)))
            all_ids.append(token)
            if text.startswith(piece, offset):
                offset += len(piece)
            elif len(all_ids) > 1:  # a piece that is no text of its own: what follows has no known place
                break
        if cuts:
            self._cuts[text] = (all_ids[: cuts[-1][1]], cuts)
            while len(self._cuts) > MAX_REMEMBERED:
                self._cuts.popitem(last=False)


def _common_chars(one: str, other: str) -> int:
    """Return how many leading characters two texts share. Pure."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
