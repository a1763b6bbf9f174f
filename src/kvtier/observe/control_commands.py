"""Commands to a living engine. Each is made on the server's thread and advanced at the end of the engine's steps.

``advance`` returns None while the command needs further steps. It never blocks: what takes long is begun there, and
looked at again in the next step.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.base import OffloadingManager, OffloadKey, ReqContext, make_offload_keys
from kvtier.connector.groups import GroupLayout
from kvtier.connector.planning import iterate_load_keys
from kvtier.connector.protocols import ControlledHalf
from kvtier.errors import ControlError, UnknownNameError
from kvtier.hints.values import parse_hints
from kvtier.observe.control_wire import Message
from kvtier.operating import Purge as PurgeUnderWay
from kvtier.redaction import shorten
from kvtier.tenants import NO_TENANT, Tenant, Tenants, is_name

COMMANDS = ("hello", "stats", "recent", "drain", "pin", "unpin", "prefetch", "purge", "resume")
"""What a request may name."""

DEFAULT_LEASE_S = 600.0
"""Long enough for a burst of requests; an operator who wants more renews it."""

MAX_LEASE_S = 86_400.0
"""The longest lease: a forgotten pin ends within a day."""

MAX_LOOKUPS = 256
"""Blocks that a command looks up in one step, a fraction of a millisecond. A prompt has some thousand."""

PromptHasher = Callable[[Sequence[int]], Sequence[bytes]]
"""Returns the engine's content hash of each full block of a prompt's token ids. Called on the server's thread."""

MAX_EXTRA_CHARS = 4096
"""Of a cache salt and of an adapter's name; engines allow less."""


@dataclass(frozen=True, slots=True)
class PromptExtras:
    """What a prompt's hashes depend on besides its tokens.

    Attributes:
        cache_salt: as its requests give it; empty for none.
        adapter: the name of their adapter (LoRA); empty for none.
    """

    cache_salt: str = ""
    adapter: str = ""


NO_EXTRAS = PromptExtras()


class ExtrasHasher(ABC):
    """A ``PromptHasher`` of an engine whose prompts have cache salts or adapters."""

    @abstractmethod
    def __call__(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> Sequence[bytes]:
        """Return the hash of each full block. Thread: the server's.

        Raises:
            ControlError: the engine knows no such adapter.
        """


class Command(ABC):
    """Something that an operator wants done. Its methods but the constructor are for the scheduler's thread."""

    @abstractmethod
    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        """Go on; return the reply when the command has ended.

        Raises:
            ControlError: it cannot be done; the message is the reply.
        """

    def abandon(self, half: ControlledHalf) -> None:
        """Undo what was begun and has not ended; its client is gone."""
        del half

    def describe_progress(self) -> str:
        """Return how far it is, as the end of a sentence. Called on the server's thread."""
        return "it goes no further"


class Drain(Command):
    """Waits until stores have ended and the tiers have got what is pending for them."""

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        if half.has_open_stores():
            return None
        # With no time to wait it only submits what is pending and says whether anything is left.
        result = half.manager.drain(0.0)
        if not result.has_ended:
            return None
        return {
            "ok": True,
            "num_lost_blocks": result.num_lost_blocks,
            "num_pending_blocks": result.num_pending_blocks,
        }

    def describe_progress(self) -> str:
        return "blocks are still being written"


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The beginning of prompts, as an operator names it.

    Attributes:
        num_tokens: its length.
        block_hashes: the engine's content hash of each full block.
        tenant: whose prompts they are.
    """

    num_tokens: int
    block_hashes: Sequence[bytes]
    tenant: Tenant = NO_TENANT

    def list_keys(self, layouts: Sequence[GroupLayout]) -> list[OffloadKey]:
        """Return the keys of the blocks that a load of the whole prefix would read.

        Raises:
            ControlError: it is shorter than one block.
        """
        keys = [
            make_offload_keys(
                map(
                    self.tenant.own_hash,
                    self.block_hashes[layout.hashes_per_block - 1 :: layout.hashes_per_block],
                ),
                layout.idx,
                self.tenant.number,
            )
            for layout in layouts
        ]
        pairs = zip(layouts, keys, strict=True)
        end_token = min(len(of_group) * layout.block_tokens for layout, of_group in pairs)
        if end_token == 0:
            block_tokens = max(layout.block_tokens for layout in layouts)
            raise ControlError(
                f"a prefix of {self.num_tokens} tokens is shorter than a block, {block_tokens} tokens"
            )
        return list(iterate_load_keys(layouts, keys, 0, end_token))


class Pin(Command):
    """Keeps the blocks of a prefix in host memory until a lease ends."""

    def __init__(self, prefix: PromptPrefix, lease_s: float) -> None:
        self._prefix = prefix
        self._lease_s = lease_s

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        keys = self._prefix.list_keys(half.layouts)
        pinned = half.manager.pin(keys, self._lease_s, needs_block=True)
        if pinned is None:
            raise _unable(half.manager, "pin")
        if not pinned.num_blocks:
            raise ControlError(
                f"nothing is pinned: host memory has none of the {len(keys)} blocks of this prefix. Send the prompt "
                "once, or use kvtier prefetch where a tier holds it; if it was served before, its token ids, salt, "
                "adapter or tenant were others"
            )
        return {"ok": True, **pinned._asdict()}


class Unpin(Command):
    """Ends leases: of a prefix, or all."""

    def __init__(self, prefix: PromptPrefix | None) -> None:
        self._prefix = prefix

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        keys = None if self._prefix is None else self._prefix.list_keys(half.layouts)
        num_blocks = half.manager.unpin(keys)
        if num_blocks is None:
            raise _unable(half.manager, "unpin")
        return {"ok": True, "num_blocks": num_blocks}


class Prefetch(Command):
    """Brings the blocks of a prefix from the tiers into host memory: it waits for them as a request would."""

    def __init__(self, prefix: PromptPrefix) -> None:
        self._prefix = prefix
        self._context = ReqContext("prefetch")
        self._left: deque[OffloadKey] | None = None
        self._num_blocks = 0
        self._num_ready = 0

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        manager = half.manager
        if self._left is None:
            self._left = deque(self._prefix.list_keys(half.layouts))
            self._num_blocks = len(self._left)
        elif manager.is_waiting(self._context):
            return None
        # What has been found stays held until the request ends, so it need not be looked up again.
        for _ in range(min(len(self._left), MAX_LOOKUPS)):
            key = self._left.popleft()
            answer = manager.lookup(key, self._context)
            self._num_ready += answer is True
            if answer is None:
                self._left.append(key)
        if self._left:
            return None
        self.abandon(half)
        return {"ok": True, "num_blocks": self._num_blocks, "num_ready": self._num_ready}

    def abandon(self, half: ControlledHalf) -> None:
        half.manager.request_finished(self._context)

    def describe_progress(self) -> str:
        return f"{self._num_ready} of {self._num_blocks} blocks are in host memory, and it waits for no more"


class Purge(Command):
    """Forgets every block that is not in use, or a tenant's, in some tiers or all."""

    def __init__(self, tiers: Sequence[str] | None, tenant: int | None = None) -> None:
        self._tiers = tiers
        self._tenant = tenant
        self._purge: PurgeUnderWay | None = None

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        if self._purge is None:
            self._purge = half.manager.purge(self._tiers, self._tenant)
            if self._purge is None:
                raise _unable(half.manager, "purge")
        purged = self._purge.result
        if purged is None:
            return None
        return {
            "ok": True,
            "num_purged": purged.num_purged,
            "num_in_use": purged.num_in_use,
            "unable": purged.unable,
        }

    def describe_progress(self) -> str:
        num_removed = 0 if self._purge is None else self._purge.num_removed
        return f"{num_removed} blocks are removed so far, and the engine goes on with it"


class Resume(Command):
    """Loads hits again that an audit has stopped."""

    def advance(self, half: ControlledHalf, now_s: float) -> Message | None:
        del now_s
        if half.audit is None:
            raise ControlError(
                "this engine audits no request: audit_ratio is 0, or its KV cannot be compared"
            )
        return {"ok": True, "was_stopped": half.audit.resume()}


def make_command(
    name: object, request: Message, hash_prompt: PromptHasher | None, tenants: Tenants | None = None
) -> Command:
    """Return the command that a request names, with its arguments checked.

    Args:
        name: the command.
        request: the request, with its arguments.
        hash_prompt: makes content hashes of token ids; None where the engine does not offer it.
        tenants: the engine's tenants of requests.

    Raises:
        UnknownNameError: there is no such command.
        ControlError: an argument is wrong.
    """
    if not isinstance(name, str):
        raise ControlError(f"do={shorten(name)}: must be the name of a command")
    if name == "drain":
        return Drain()
    if name == "pin":
        lease_s = read_number(request, "lease_s", DEFAULT_LEASE_S, MAX_LEASE_S)
        return Pin(read_prefix(request, hash_prompt, tenants), lease_s)
    if name == "unpin":
        return Unpin(None if request.get("all") is True else read_prefix(request, hash_prompt, tenants))
    if name == "prefetch":
        return Prefetch(read_prefix(request, hash_prompt, tenants))
    if name == "purge":
        return Purge(read_tiers(request), read_purged_tenant(request, tenants))
    if name == "resume":
        return Resume()
    raise UnknownNameError("command", name, COMMANDS)


def read_prefix(
    request: Message, hash_prompt: PromptHasher | None, tenants: Tenants | None = None
) -> PromptPrefix:
    """Return the prefix whose token ids a request gives.

    Raises:
        ControlError: there are none, or the engine makes no hashes of them.
    """
    if hash_prompt is None:
        raise ControlError("this engine does not say how it hashes a prompt: give open_control a hash_prompt")
    token_ids = request.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise ControlError(f"token_ids={shorten(token_ids)}: must be a list of the prefix's token ids")
    wrong = [one for one in token_ids if isinstance(one, bool) or not isinstance(one, int)]
    if wrong or not all(0 <= one < 2**31 for one in token_ids):
        raise ControlError(
            f"token_ids={shorten(wrong or token_ids)}: must be whole numbers from 0 to 2^31 - 1"
        )
    extras = read_extras(request)
    if extras == NO_EXTRAS:
        hashes = hash_prompt(token_ids)
    elif isinstance(hash_prompt, ExtrasHasher):
        hashes = hash_prompt(token_ids, extras)
    else:
        given = next(name for name in ("cache_salt", "adapter") if request.get(name))
        raise ControlError(f"{given}: prompts of this engine have no cache salt and no adapter")
    return PromptPrefix(len(token_ids), list(hashes), read_tenant(request, tenants))


def read_extras(request: Message) -> PromptExtras:
    """Return the cache salt and the adapter that a request names. Pure.

    Raises:
        ControlError: one of them is no name. A salt is not shown.
    """
    found = {}
    for name in ("cache_salt", "adapter"):
        value = request.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or not 0 < len(value) <= MAX_EXTRA_CHARS:
            shown = shorten(value) if name == "adapter" else "..."
            raise ControlError(f"{name}={shown}: must be a text of 1 to {MAX_EXTRA_CHARS} characters")
        found[name] = value
    return PromptExtras(**found)


def read_tenant(request: Message, tenants: Tenants | None) -> Tenant:
    """Return the tenant that a request names.

    Raises:
        ControlError: the engine has no such tenant, or has tenants and the request names none.
    """
    name = request.get("tenant")
    if tenants is None and name is None:
        return NO_TENANT
    found = None if tenants is None else tenants.find(request, parse_hints({"tenant": name}))
    if found is None:
        raise ControlError(f"tenant={shorten(name)}: must be a tenant of the engine's setting tenants")
    return found


def read_purged_tenant(request: Message, tenants: Tenants | None) -> int | None:
    """Return the number of the tenant whose blocks a request wants purged; None: everybody's.

    Raises:
        ControlError: the engine has no tenants, or that is no name.
        UnknownNameError: the engine serves no such tenant.
    """
    name = request.get("tenant")
    if name is None:
        return None
    if tenants is None:
        raise ControlError(
            f"tenant={shorten(name)}: this engine has no tenants: its setting tenants is not set"
        )
    if not isinstance(name, str) or not is_name(name):
        raise ControlError(f"tenant={shorten(name)}: must be the name of a tenant of requests")
    if name not in tenants.by_name and tenants.others is None:
        raise UnknownNameError("tenant", name, tenants.by_name)
    return tenants.number_of(name)


def read_tiers(request: Message) -> list[str] | None:
    """Return the tiers that a request names; None for all.

    Raises:
        ControlError: it names none.
    """
    if request.get("all") is True:
        return None
    tiers = request.get("tiers")
    if not isinstance(tiers, list) or not tiers or not all(isinstance(one, str) for one in tiers):
        raise ControlError(f"tiers={shorten(tiers)}: must be a list of tiers, or give all=true")
    return tiers


def read_number(request: Message, name: str, default: float, maximum: float) -> float:
    """Return a number of a request from 0 to ``maximum``. Pure.

    Raises:
        ControlError: it is anything else.
    """
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        raise ControlError(f"{name}={shorten(value)}: must be a number from 0 to {maximum:g}")
    return value


def _unable(manager: OffloadingManager, command: str) -> ControlError:
    return ControlError(f"this engine's manager, {type(manager).__name__}, cannot {command}")
