"""Every exception class of kvtier.

Nothing here decides when an error is raised. Each class keeps the data of its message in fields, so
that a caller never parses text; the message says what happened, the value, what was expected and
what to do.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")


def hide_credentials(text: str) -> str:
    """Return ``text`` without user and password of URLs in it. Pure."""
    return _CREDENTIALS.sub("***", text)


def shorten(value: object, max_chars: int = 80) -> str:
    """Return ``value`` as it is written in Python, cut after ``max_chars``. Pure."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        text = f"<{type(value).__name__} of thousands of digits>"
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose. Each reaches another process whole."""

    def __reduce__(self) -> tuple[Callable[..., "KVTierError"], tuple[Any, ...]]:  # Any: what pickle keeps
        """Return how to make an equal error: its text and fields, for its constructor takes other arguments."""
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple), "an exception is its class, its arguments and perhaps its fields"
        _, arguments, *state = reduced
        return _restore, (type(self), arguments, state[0] if state else {})


def _restore(kind: type[KVTierError], arguments: tuple[Any, ...], state: Mapping[str, Any]) -> KVTierError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    for name, value in state.items():
        setattr(error, name, value)
    return error


class ConfigError(KVTierError, ValueError):
    """A setting has a value that cannot work.

    Attributes:
        setting: name of the setting, as the user wrote it.
        value: the refused value.
        remedy: what was expected and what to do.
        max_value_chars: after how many characters the message cuts the value; None shows all of it.
    """

    def __init__(
        self, setting: str, value: object, remedy: str, *, max_value_chars: int | None = None
    ) -> None:
        self.setting = setting
        self.value = value
        self.remedy = remedy
        self.max_value_chars = max_value_chars
        shown = repr(value) if max_value_chars is None else shorten(value, max_value_chars)
        super().__init__(hide_credentials(f"{setting}={shown}: {remedy}"))


class UnknownNameError(KVTierError, ValueError):
    """A name (of a setting, tier, policy, spec, codec) that nobody has registered.

    Args:
        kind: what the name was meant to be, for example "setting".
        name: the unknown name.
        known: every known name.
        meant: what is known to be meant by it; otherwise the known name that looks most like it.
        also: what else than a known name would do, as the end of a sentence.

    Attributes:
        kind: the same.
        name: the same.
        known: every known name, sorted.
        meant: the same.
        also: the same.
        nearest: the known name that is meant, or looks most like it; None when none does.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], *, meant: Iterable[str] = (), also: str = ""
    ) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(sorted(known))
        self.meant = tuple(meant)
        self.also = also
        found = self.meant or _nearest(name, self.known)
        self.nearest = found[0] if found else None
        hint = f"did you mean {' or '.join(map(repr, found))}? " if found else ""
        end = f"; {also}" if also else ""
        super().__init__(
            f"unknown {kind} {shorten(name)}: {hint}known are {', '.join(self.known) or 'none'}{end}"
        )


def _nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known name that looks most like ``name`` in whatever case, if one does. Pure."""
    by_lower = {one.lower(): one for one in known}
    return tuple(by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5))


class NamedClassError(KVTierError, ValueError):
    """A class of somebody else's, named as ``package.module:Class`` or offered by a package, cannot be used.

    Attributes:
        kind: what it was to be, for example "eviction policy".
        name: what the configuration says.
        reason: what is wrong and what to do.
    """

    def __init__(self, kind: str, name: str, reason: str) -> None:
        self.kind = kind
        self.name = name
        self.reason = reason
        super().__init__(f"{kind} {shorten(name)}: {reason}")


class DuplicateNameError(KVTierError, ValueError):
    """A name is registered a second time.

    Attributes:
        kind: what the name stands for.
        name: the name that is taken.
    """

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        super().__init__(f"{kind} {name!r} is already registered: choose another name")


class MissingExtraError(KVTierError, ImportError):
    """A client library is not installed.

    Attributes:
        extra: the extra of the package that brings it.
    """

    def __init__(self, module: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"module {module!r} is missing: pip install 'kvtier[{extra}]'", name=module)


class BlockNotReadyError(KVTierError, KeyError):
    """A load named a key that is absent or whose write is still in flight.

    Attributes:
        key: the offending key.
    """

    def __init__(self, key: bytes, state: str) -> None:
        self.key = key
        self.state = state
        super().__init__(f"block {key.hex()} is {state}: look it up in the same step, before prepare_load")

    def __str__(self) -> str:
        return str(self.args[0])


class InvariantError(KVTierError, AssertionError):
    """An internal invariant does not hold: a bug in kvtier, not a mistake of its user."""


class RegionError(KVTierError):
    """The shared-memory region cannot be made or joined."""


class RegionGeometryError(RegionError, ValueError):
    """A region exists, is alive, and has another size or shape than asked for."""


class RegionOwnerError(RegionError, PermissionError):
    """The region's file belongs to another user."""


class RegionMemoryError(RegionError, MemoryError):
    """The shared-memory mount or the container's limit is too small for the region."""


class WorkerAreaError(RegionError, AssertionError):
    """A view would run over the end of a worker's part of the rows."""


class KVCacheLayoutError(KVTierError, ValueError):
    """The registered KV cache tensors cannot be placed in rows."""


class DeviceCopyError(KVTierError, RuntimeError):
    """A device refused to copy between its memory and the rows.

    Attributes:
        call: what was called.
        code: what it answered.
        num_copies: copies that it was asked for.
        refused: which of them it refused; None when it did not say.
    """

    def __init__(self, call: str, code: object, num_copies: int, refused: int | None) -> None:
        self.call = call
        self.code = code
        self.num_copies = num_copies
        self.refused = refused
        which = "" if refused is None else f", number {refused}"
        super().__init__(f"{call} refused one of {num_copies} copies{which}: {code}")


class TierError(KVTierError):
    """A secondary tier cannot do what was asked of it.

    Attributes:
        tier: the tier's type name.
    """

    def __init__(self, tier: str, message: str) -> None:
        self.tier = tier
        super().__init__(f"tier {tier!r}: {message}")


class ModelError(KVTierError, ValueError):
    """A model that an engine cannot serve, for example one without a KV cache."""


class SequenceLengthError(KVTierError, ValueError):
    """A request would grow beyond the length up to which its model rotates keys alike.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_new_tokens: output tokens whose keys and values would be computed.
        last_tokens: the greatest length of such a sequence.
        rope_type: how the model rotates keys.
    """

    def __init__(self, num_prompt_tokens: int, num_new_tokens: int, last_tokens: int, rope_type: str) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = num_new_tokens
        self.last_tokens = last_tokens
        self.rope_type = rope_type
        # An output's last token is chosen and not computed, so that one more fits.
        most = last_tokens - num_prompt_tokens + 1
        remedies = [f"ask for at most {most} new tokens" if most > 0 else "shorten the prompt"]
        if rope_type != "dynamic":
            remedies.append(f"give a prompt of more than {last_tokens} tokens")
        remedies.append("call model.generate without kvtier")
        super().__init__(
            f"a prompt of {num_prompt_tokens} tokens and {num_new_tokens} computed after it exceed {last_tokens} "
            f"tokens, beyond which the model's {rope_type} rope rotates every key otherwise: {', or '.join(remedies)}"
        )


class DevicePoolError(KVTierError, MemoryError):
    """A request needs more device blocks than the engine's pool can give.

    Attributes:
        num_device_blocks: blocks in the pool.
        num_needed_blocks: blocks that were asked for.
        num_free_blocks: blocks that nobody uses.
    """

    def __init__(self, num_device_blocks: int, num_needed_blocks: int, num_free_blocks: int) -> None:
        self.num_device_blocks = num_device_blocks
        self.num_needed_blocks = num_needed_blocks
        self.num_free_blocks = num_free_blocks
        super().__init__(
            f"the request needs {num_needed_blocks} device blocks but only {num_free_blocks} of "
            f"num_device_blocks={num_device_blocks} are free: raise num_device_blocks, or shorten the prompt "
            "or max_new_tokens"
        )


class EngineStateError(KVTierError, RuntimeError):
    """An engine was asked for something that it cannot do now: it is busy, shut down, or not yet done."""


class TraceError(KVTierError, ValueError):
    """A request trace cannot be read.

    Attributes:
        path: the file.
        line: where in it, from 1; None when it is about the file as a whole.
        value: what stands there.
        remedy: what was expected and what to do.
    """

    def __init__(self, path: object, line: int | None, value: object, remedy: str) -> None:
        self.path = str(path)
        self.line = line
        self.value = value
        self.remedy = remedy
        place = self.path if line is None else f"{self.path}:{line}"
        super().__init__(f"{place}: {shorten(value)}: {remedy}")


class RestartError(KVTierError, RuntimeError):
    """The demo's second process ended without having answered.

    Attributes:
        status: its exit status; negative when a signal ended it.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"the restarted process ended with status {status}: {message or 'it said nothing'}")


class LayerLoadError(KVTierError):
    """A load failed that a step was computing with: what it computed is worthless, and is computed anew."""


class SimulationDiedError(KVTierError, RuntimeError):
    """A process ended before its simulation did.

    Attributes:
        num_processes: how many ran at the same time.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        super().__init__(
            f"one of {num_processes} simulating processes was ended from outside, by lack of memory perhaps: "
            "ask for fewer at a time"
        )


class EventMessageError(KVTierError, ValueError):
    """A message that was heard is none of vLLM's KV-event publisher.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"no message of a KV-event publisher ({reason}): is the endpoint another service's?")
