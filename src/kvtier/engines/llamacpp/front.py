"""The front before a llama-server: a reverse proxy that restores what is stored of a prompt, and stores what is new.

For a completion whose prompt it knows, the front

    1. gets the token ids, and a slot: the one that holds most of the prompt, else one that is stored,
    2. saves the slot's conversation if it is not stored and the request will overwrite it,
    3. restores the longest stored prefix if that is longer than what the slot holds,
    4. passes the request on with the slot's number, and the answer back as it comes.

A conversation is stored when its slot has been idle for a while, and at the end. Everything else passes through. What
is stored is what the server wrote, tokens and rows out of one file, so ids that the front gets wrong cost a hit and
never an answer. Whatever fails costs the hit: the request goes on without.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from kvtier.engines.llamacpp.blocks import BlockFormat
from kvtier.engines.llamacpp.command_line import ServerCommand
from kvtier.engines.llamacpp.conversations import NOTHING_RESTORED, ConversationStore, Restored
from kvtier.engines.llamacpp.identity import ServerIdentity, is_unchanged, read_adapters, read_identity
from kvtier.engines.llamacpp.passing import BrokenAnswerError, add_slot, is_single, pass_on, read_fields
from kvtier.engines.llamacpp.record_store import RecordStore
from kvtier.engines.llamacpp.request_log import ControlledFront, RequestLog, make_record
from kvtier.engines.llamacpp.self_test import Examined, examine_server, restore_slot, save_slot
from kvtier.engines.llamacpp.server import CHAT_PATHS, COMPLETION_PATHS, LlamaServer
from kvtier.engines.llamacpp.settings import LlamaSettings
from kvtier.engines.llamacpp.slots import MIN_GAIN_TOKENS, FrontSlot, SlotTable, common_prefix
from kvtier.errors import KVTierError, LlamaServerError, SlotFormatError
from kvtier.observe.control import EngineControl, open_control

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMPUTING_PATHS = frozenset(
    ("/v1/messages", "/v1/responses", "/infill", "/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking",
     "/v1/rerank", "/v1/reranking", "/api/chat")
)  # fmt: skip
"""Requests whose prompt the front does not know; the server may put them into any slot."""

ADAPTER_FIELDS = frozenset({"lora", "n_cache_reuse"})
"""What in a request makes the rows of its slot mean something else: served in a slot that is erased after it."""

STEP_S = 0.25
"""Seconds between two steps of the tiers while nothing else makes one, and between two looks for idle slots."""

PROBE_S = 0.5
"""Seconds between two looks whether a server has started."""

MAX_TESTS = 3
"""Tries of the self-test."""


class Front:
    """The front of one server. Used from one event loop; its store has a thread of its own.

    Args:
        server: the server.
        settings: the front's settings.
        extra_config: kvtier's settings.
        command: how the server was started; None where that is not known.
        slot_folder: the server's directory for slot files.
        refusals: why nothing is kept; empty: try.

    Attributes:
        log: of the requests.
        conversations: what is stored; None while nothing is kept.
        was_ready: whether the server's model has ever been loaded.
    """

    def __init__(
        self,
        server: LlamaServer,
        settings: LlamaSettings,
        extra_config: Mapping[str, Any],
        command: ServerCommand | None,
        slot_folder: Path,
        refusals: Sequence[str] = (),
    ) -> None:
        self._server = server
        self._settings = settings
        self._extra_config = extra_config
        self._command = command
        self._folder = slot_folder
        self._refusals = refusals
        self.log = RequestLog()
        self.conversations: ConversationStore | None = None
        self._is_keeping = False
        self._identity: ServerIdentity | None = None
        self._table = SlotTable(())
        self._saves_each = settings.saves_each
        self._has_other_adapters = False
        self._should_retry = False
        self._starting: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtier-llama-store")
        self._control: EngineControl | None = None
        self._half: ControlledFront | None = None
        self._lock_file: int | None = None
        self._num_requests = 0
        self.was_ready = False

    # ---- start and end

    async def run(self) -> None:
        """Begin, and go on with saves and the steps of the tiers until cancelled."""
        self.begin_start()
        while True:
            await asyncio.sleep(STEP_S)
            if self._should_retry:
                self.begin_start()
            try:
                if self.conversations is not None:
                    await self._in_store(self._step)
                if self._is_keeping:
                    await self._save_idle(self._settings.idle_s)
            except (KVTierError, OSError) as error:
                self._warn("idle conversations are not saved", error)

    def begin_start(self) -> None:
        """Find out, now or again, what the server has loaded and whether it can be kept."""
        self._is_keeping = False
        self._should_retry = False
        self._table.forget_all()
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())

    async def close(self) -> None:
        """Save what is not stored, and end the tiers."""
        if self._starting is not None:
            self._starting.cancel()
        if self._is_keeping:
            with suppress(KVTierError, OSError, TimeoutError):
                await asyncio.wait_for(self._save_idle(0.0), self._settings.end_s)
        self._is_keeping = False
        if self._control is not None:
            self._control.close()
        if self.conversations is not None:
            await self._in_store(self.conversations.store.close)
        self._thread.shutdown()
        if self._lock_file is not None:
            os.close(self._lock_file)

    async def _start(self) -> None:
        while not await self._server.is_ready():
            await asyncio.sleep(PROBE_S)
        self.was_ready = True
        try:
            if self._refusals:
                raise LlamaServerError("; ".join(self._refusals))
            self._lock_folder()
            await self._examine()
        except (KVTierError, OSError) as error:
            logger.warning("kvtier keeps nothing and passes every request on: %s", error)
            self._should_retry = not await self._server.is_ready()

    async def _wait_settled(self) -> None:
        """Wait until it is known whether a server that is ready can be kept; one that is not answers for itself."""
        starting = self._starting
        if starting is not None and not starting.done() and await self._server.is_ready():
            await asyncio.wait({starting})

    def _lock_folder(self) -> None:
        """Refuse a second front of one server: each would take the other's slots.

        Raises:
            LlamaServerError: there is another, or the directory does not exist.
        """
        if self._lock_file is not None:
            return
        try:
            descriptor = os.open(self._folder / ".kvtier.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LlamaServerError(f"{self._folder} cannot be used for slot files: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise LlamaServerError(f"another front of kvtier uses {self._folder}") from None
        self._lock_file = descriptor

    async def _examine(self) -> None:
        identity = await read_identity(self._server, self._command, self._settings.model)
        examined = await examine_server(
            self._server, self._folder, identity.window_tokens, identity.num_slots
        )
        window_tokens = identity.window_tokens if examined.layout.window is not None else None
        form = BlockFormat(examined.layout, self._settings.block_tokens, window_tokens)
        await self._open_store(identity, form)
        self._identity = identity
        self._table = SlotTable(await self._server.slots())
        self._table.compare({})
        self._has_other_adapters = False
        if examined.empties_idle_slots and not self._saves_each:
            logger.warning(
                "the server empties idle slots, so each conversation is saved at its end; --cache-ram 0 avoids that"
            )
        self._saves_each = self._settings.saves_each or examined.empties_idle_slots
        self._is_keeping = True
        assert self.conversations is not None, "it was opened"
        stats = self.conversations.store.manager.stats()
        held = sum(
            number for name, number in stats.items() if name.endswith((".indexed_blocks", ".held_blocks"))
        )
        logger.info(
            "kvtier keeps the conversations of %s in %d slots; self-test passed (log-probabilities differ by %.2g); "
            "%d pieces found; watch it with: kvtier top",
            identity.alias,
            identity.num_slots,
            examined.difference,
            held,
        )

    async def _test_server(self, identity: ServerIdentity) -> Examined:
        """Run the self-test; a request that was under way when it began may spoil it, so it has several tries."""
        for _ in range(MAX_TESTS - 1):
            with suppress(LlamaServerError, SlotFormatError):
                return await examine_server(
                    self._server, self._folder, identity.window_tokens, identity.num_slots
                )
            await asyncio.sleep(PROBE_S)
        return await examine_server(self._server, self._folder, identity.window_tokens, identity.num_slots)

    async def _open_store(self, identity: ServerIdentity, form: BlockFormat) -> None:
        config = identity.make_config(form, self._extra_config)
        if self.conversations is not None:
            if self.conversations.store.config == config and self.conversations.form == form:
                return
            await self._in_store(self.conversations.store.close)
            self.conversations = None
        store = await self._in_store(lambda: RecordStore(config, form))
        self.conversations = ConversationStore(form, store)
        self._half = ControlledFront(store.manager, self.log)
        if self._control is None:
            self._control = open_control(config)
        if self._control is not None:
            self._control.attach(self._half)

    def _step(self) -> None:
        """One step of the tiers; the control socket's commands are carried out in it. Thread: the store's."""
        if self.conversations is not None:
            self.conversations.store.step()
        if self._control is not None:
            self._control.on_step_end()

    async def _in_store(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _warn(self, what: str, error: BaseException) -> None:
        self.log.count("failures")
        logger.warning("kvtier: %s: %s", what, error)

    # ---- saves

    async def _save_idle(self, idle_s: float) -> None:
        slots = self._table.idle(idle_s)
        if not slots:
            return
        await self._compare_slots()
        for slot in slots:
            if slot.is_unsaved and not slot.is_busy:
                async with self._table.hold(slot):
                    await self._save(slot)

    async def _compare_slots(self) -> None:
        """Forget what the server no longer holds. The server answers this during a batch too."""
        if self._table.compare(await self._server.slots()):
            logger.warning("llama-server was restarted: it is looked at again")
            self.begin_start()
            raise LlamaServerError("the server was restarted")

    async def _save(self, slot: FrontSlot) -> None:
        """Store a slot's conversation. The caller holds the slot."""
        slot.is_unsaved = False
        conversations, identity = self.conversations, self._identity
        if conversations is None or identity is None or not self._is_keeping:
            return
        try:
            if not await is_unchanged(self._server, identity):
                self.begin_start()
                raise LlamaServerError("the model, its adapters or its files have changed")
            saved = await save_slot(self._server, self._folder, slot.number)
            # Fails after a context shift: its rows were computed behind tokens that are no longer there.
            if saved.tokens[: len(slot.tokens)] != tuple(slot.tokens):
                raise SlotFormatError("the slot does not begin with the prompt that was sent to it")
            server_slot = (await self._server.slots()).get(slot.number)
            if server_slot is None or (slot.task is not None and server_slot.task != slot.task):
                raise LlamaServerError("another client used the slot meanwhile")
            num_new = await self._in_store(lambda: conversations.keep(saved))
            slot.tokens = saved.tokens
            self.log.count("saves")
            self.log.count("stored_records", num_new)
        except (KVTierError, OSError) as error:
            slot.forget()
            self._warn("a conversation was not saved", error)

    # ---- requests

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request."""
        body = await request.read()
        if request.method != "POST":
            return await self._forward(request, body)
        path = request.path
        if path in CHAT_PATHS or path in COMPLETION_PATHS:
            await self._wait_settled()
            fields = read_fields(body) if self._is_keeping else None
            if fields is not None and is_single(fields):
                return await self._complete(request, body, fields)
        is_computing = path in CHAT_PATHS or path in COMPLETION_PATHS or path in COMPUTING_PATHS
        self.log.count("passed_requests")
        try:
            return await self._forward(request, body)
        finally:
            if is_computing or path.startswith("/slots"):
                self._table.forget_all()
            if path == "/lora-adapters":
                await asyncio.shield(self._look_at_adapters())

    async def _look_at_adapters(self) -> None:
        identity = self._identity
        with suppress(LlamaServerError):
            found = await read_adapters(self._server)
            self._has_other_adapters = identity is not None and found != identity.adapters
        self._table.forget_all()

    async def _complete(
        self, request: web.Request, body: bytes, fields: Mapping[str, Any]
    ) -> web.StreamResponse:
        began_s = time.monotonic()
        headers = {
            name: request.headers[name] for name in ("Authorization", "X-Api-Key") if name in request.headers
        }
        tokens = None
        try:
            tokens = await self._server.prompt_tokens(request.path, fields, headers)
        except (LlamaServerError, KeyError, TypeError) as error:
            logger.debug("a prompt is passed on as it is: %s", error)
        if not tokens:
            self.log.count("passed_requests")
            try:
                return await self._forward(request, body)
            finally:
                self._table.forget_all()
        is_foreign = self._has_other_adapters or not ADAPTER_FIELDS.isdisjoint(fields)
        async with self._table.use(tokens) as slot:
            await self._prepare(slot, tokens, is_foreign=is_foreign, began_s=began_s)
            slot.tokens, slot.is_unsaved, slot.task = tokens, not is_foreign and self._is_keeping, None
            try:
                return await self._forward(request, add_slot(body, fields, slot.number))
            finally:
                await asyncio.shield(self._finish(slot, is_foreign=is_foreign))

    async def _prepare(
        self, slot: FrontSlot, tokens: Sequence[int], *, is_foreign: bool, began_s: float
    ) -> None:
        """Save what the request will overwrite, then restore what is stored of its prompt."""
        conversations = self.conversations
        if conversations is None or not self._is_keeping:
            return
        restored, held = NOTHING_RESTORED, 0
        try:
            await self._compare_slots()
            held = common_prefix(slot.tokens, tokens)
            if slot.is_unsaved and (held < len(slot.tokens) or is_foreign):
                await self._save(slot)
            if is_foreign:
                self.log.count("foreign_requests")
                return
            if not conversations.form.is_cuttable and held < len(slot.tokens):
                held = 0  # the server can go back to a checkpoint at most
            restored = await self._restore(slot, tokens, held)
        except (KVTierError, OSError) as error:
            self._warn("a prompt was not looked for", error)
        num_found = restored.num_tokens or held
        miss = None
        if num_found + conversations.form.block_tokens < len(tokens):
            miss = await self._in_store(lambda: conversations.explain(tokens, num_found))
        self._num_requests += 1
        self.log.add(
            make_record(
                f"llama-{self._num_requests}",
                len(tokens),
                held,
                restored.tokens_by_tier,
                conversations.form.block_tokens,
                miss,
                time.monotonic() - began_s,
            )
        )

    async def _restore(self, slot: FrontSlot, tokens: Sequence[int], held: int) -> Restored:
        conversations = self.conversations
        least = held + MIN_GAIN_TOKENS
        identity = self._identity
        if conversations is None or identity is None or not least < len(tokens) < identity.num_slot_tokens:
            return NOTHING_RESTORED
        restored = await self._in_store(lambda: conversations.restore(tokens, least))
        if not restored.num_tokens:
            return NOTHING_RESTORED
        try:
            await restore_slot(self._server, self._folder, slot.number, restored.data)
        except LlamaServerError as error:
            slot.forget()
            self._warn("a prefix was not restored", error)
            return NOTHING_RESTORED
        self.log.count("restores")
        self.log.count("restored_tokens", restored.num_tokens)
        return restored

    async def _finish(self, slot: FrontSlot, *, is_foreign: bool) -> None:
        """Note what the slot holds after a request; one whose rows mean something else is erased."""
        try:
            if is_foreign:
                slot.forget()
                await self._server.slot_action(slot.number, "erase")
                return
            found = (await self._server.slots()).get(slot.number)
            if found is None or not slot.tokens:
                slot.forget()
                return
            slot.task = found.task
            slot.tokens = slot.tokens[: found.num_tokens]  # fewer after an abort
            slot.is_unsaved = slot.is_unsaved and bool(slot.tokens)
            if self._saves_each and slot.is_unsaved:
                await self._save(slot)
        except LlamaServerError as error:
            slot.forget()
            self._warn("a slot is not known after a request", error)

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        try:
            return await pass_on(self._server, request, body)
        except LlamaServerError as error:
            self._warn("a request was not answered", error)
            self.begin_start()
            message = {"code": 502, "message": str(error), "type": "server_error"}
            return web.json_response({"error": message}, status=502)
        except BrokenAnswerError as error:
            self._warn("an answer was not finished", error)
            self.begin_start()
            raise
