"""Every exception class of kvtier.

Each class keeps the data of its message in fields, so that a caller never parses text. The message has what happened,
the value, what was expected and what to do.
"""

import difflib
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtier.redaction import HIDDEN, MAX_SHOWN_CHARS, hide_secrets, redact, shorten

MAX_PATH_CHARS = 255
"""Characters of a path in a message: its end, which names the file."""


def describe_foreign(error: BaseException) -> str:
    """Return what a foreign exception was and where, without its text: that may quote a secret. Pure."""
    code = error.errno if isinstance(error, OSError) else None
    said = type(error).__name__ if code is None else os.strerror(code)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return (
        said if frame is None else f"{said}, {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
    )


def format_foreign(error: BaseException) -> str:
    """Return the traceback of a foreign exception and of what it came of, without their texts. Pure."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append("".join(traceback.format_tb(current.__traceback__)) + describe_foreign(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhich led to\n".join(reversed(parts))


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose. Errors keep their fields when they are pickled."""

    def __reduce__(self) -> tuple[Callable[..., "KVTierError"], tuple[Any, ...]]:  # Any: as in pickle
        """Return how to make an equal error from its text and fields; its constructor has other parameters."""
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
    """A setting has an invalid value.

    Attributes:
        setting: name of the setting, as the user wrote it.
        value: the refused value; what could be a secret in it is replaced.
        remedy: what was expected and what to do.
        max_value_chars: length after which the message cuts the value.
    """

    def __init__(
        self, setting: str, value: object, remedy: str, *, max_value_chars: int = MAX_SHOWN_CHARS
    ) -> None:
        self.setting = setting
        self.value = redact(setting, value)
        self.max_value_chars = max_value_chars
        shown = HIDDEN if self.value == HIDDEN else shorten(self.value, max_value_chars)
        if isinstance(value, str) and value and (len(value) > max_value_chars or self.value != value):
            remedy = remedy.replace(value, "...")  # what a library says of a value repeats it
        self.remedy = hide_secrets(remedy)
        # A switch, or an argument that was left out, has nothing that its user would recognise as a value.
        is_bare = (value is None or isinstance(value, bool)) and (
            setting.startswith("--") or setting.isupper()
        )
        named = setting if is_bare else f"{setting}={shown}"
        super().__init__(f"{named}: {self.remedy}")


class PlaceError(ConfigError):
    """What lies where a tier is to keep its blocks stops it: something else, what another user owns, or more than fits.

    The setting that names the place may be right all the same, and the place be mended later: a tier that is not
    ``required`` is left out, and no start ends.
    """


class UnknownNameError(KVTierError, ValueError):
    """A name (of a setting, tier, policy, spec, codec) is not registered.

    Args:
        kind: kind of the name, for example "setting".
        name: the unknown name.
        known: every known name.
        meant: the known name that is meant; default: the most similar one.
        also: alternative to a known name, as the end of a sentence.

    Attributes:
        kind: as given.
        name: as given.
        known: every known name, sorted.
        meant: as given.
        also: as given.
        nearest: the known name that is meant or most similar; None without one.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], *, meant: Iterable[str] = (), also: str = ""
    ) -> None:
        self.kind = kind
        self.name = str(redact("", name))
        self.known = tuple(sorted(known))
        # What is meant may be made of the name, as a class of a path with dots is.
        self.meant = tuple(meant) if self.name == name else ()
        self.also = also
        found = self.meant or _nearest(name, self.known)
        self.nearest = found[0] if found else None
        hint = f"did you mean {' or '.join(map(repr, found))}? " if found else ""
        end = f"; {also}" if also else ""
        super().__init__(
            f"unknown {kind} {shorten(name)}: {hint}known are {', '.join(self.known) or 'none'}{end}"
        )


def _nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known name that is most similar to ``name``, ignoring case, if there is one. Pure."""
    by_lower = {one.lower(): one for one in known}
    return tuple(by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5))


class NamedClassError(KVTierError, ValueError):
    """A class that a setting names as ``package.module:Class``, or that a package offers, cannot be used.

    Also a name that no longer comes with kvtier.

    Attributes:
        kind: what it is used as, for example "eviction policy".
        name: the name in the configuration.
        reason: what is wrong and what to do.
    """

    def __init__(self, kind: str, name: str, reason: str) -> None:
        self.kind = kind
        self.name = str(redact("", name))
        if len(name) > MAX_SHOWN_CHARS or self.name != name:
            reason = reason.replace(name, "...")
        self.reason = hide_secrets(reason)
        super().__init__(f"{kind} {shorten(self.name)}: {self.reason}")


class NamespaceDocumentError(KVTierError, ValueError):
    """A text is not the description of a namespace.

    Attributes:
        text: the text.
        reason: what is wrong with it.
    """

    def __init__(self, text: str, reason: str) -> None:
        self.text = text
        self.reason = reason
        super().__init__(f"{shorten(text)} is not the namespace.json of a tier: {reason}")


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


SYSTEM_PACKAGES = {"mooncake": "libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4"}
"""By extra, Debian's packages with the shared libraries that its wheel links against and does not bring."""


def install_command(extra: str) -> str:
    """Return how to install what an extra needs: from a checkout, since no index has the package. Pure."""
    return f"pip install '.[{extra}]' in kvtier's checkout"


class MissingExtraError(KVTierError, ImportError):
    """A client library is not installed, or a shared library that it links against.

    Attributes:
        extra: the extra of the package that installs it.
    """

    def __init__(self, module: str, extra: str) -> None:
        self.extra = extra
        remedy = install_command(extra)
        if extra in SYSTEM_PACKAGES:
            remedy += f" and apt-get install {SYSTEM_PACKAGES[extra]}"
        super().__init__(f"module {module!r} is missing: {remedy}", name=module)


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
    """A region exists, is in use, and has another size or shape than requested."""


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
        call: the call.
        code: its result.
        num_copies: copies in the call.
        refused: index of the refused copy; None when unknown.
    """

    def __init__(self, call: str, code: object, num_copies: int, refused: int | None) -> None:
        self.call = call
        self.code = code
        self.num_copies = num_copies
        self.refused = refused
        which = "" if refused is None else f", number {refused}"
        super().__init__(f"{call} refused one of {num_copies} copies{which}: {code}")


class TierError(KVTierError):
    """A secondary tier cannot do what was requested.

    Attributes:
        tier: the tier's type name.
    """

    def __init__(self, tier: str, message: str) -> None:
        self.tier = tier
        super().__init__(f"tier {tier!r}: {message}")


class ModelError(KVTierError, ValueError):
    """A model that an engine cannot serve, for example one without a KV cache."""


class SequenceLengthError(KVTierError, ValueError):
    """A request would exceed the length up to which its model has positions, or its keys do not depend on the length.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_new_tokens: output tokens whose keys and values would be computed.
        last_tokens: the greatest length of such a sequence.
        rope_type: the model's type of rotary position embedding; empty when its table of positions ends there.
    """

    def __init__(self, num_prompt_tokens: int, num_new_tokens: int, last_tokens: int, rope_type: str) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = num_new_tokens
        self.last_tokens = last_tokens
        self.rope_type = rope_type
        # An output's last token is sampled and not computed, so one more fits.
        most = last_tokens - num_prompt_tokens + 1
        remedies = [f"ask for at most {most} new tokens" if most > 0 else "shorten the prompt"]
        if rope_type and rope_type != "dynamic":
            remedies.append(f"give a prompt of more than {last_tokens} tokens")
        if rope_type:
            remedies.append("call model.generate without kvtier")
            reason = f"beyond which the model's {rope_type} rope rotates every key otherwise"
        else:
            reason = "for which alone the model has positions"
        super().__init__(
            f"a prompt of {num_prompt_tokens} tokens and {num_new_tokens} computed after it exceed {last_tokens} "
            f"tokens, {reason}: {', or '.join(remedies)}"
        )


class FingerprintError(KVTierError, OSError):
    """A file of a model cannot be read, so nothing says which weights made the model's blocks.

    Attributes:
        path: the file.
        reason: what went wrong.
        remedy: what to do.
    """

    def __init__(self, path: object, reason: str, remedy: str) -> None:
        self.path = str(path)
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{self.path}: {reason}: {remedy}")


class SlotFormatError(KVTierError, ValueError):
    """A slot file of llama.cpp's is damaged, or has a layout that kvtier does not know."""


class LlamaServerError(KVTierError, RuntimeError):
    """llama-server refused a call, cannot be reached, or cannot be served; the message has the reason."""


class DevicePoolError(KVTierError, MemoryError):
    """A request needs more device blocks than the engine's pool can give.

    Attributes:
        num_device_blocks: blocks in the pool.
        num_needed_blocks: requested blocks.
        num_free_blocks: free blocks.
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
    """An engine cannot do something in its current state: it is busy, shut down, or not yet done."""


class ControlError(KVTierError, RuntimeError):
    """A living engine cannot be reached through its control socket, or refuses a command."""


class NoEngineError(ControlError):
    """No engine of this user that runs has a control socket.

    Args:
        folders: where sockets were looked for.
    """

    def __init__(self, folders: Iterable[object]) -> None:
        places = ", ".join(map(str, folders))
        super().__init__(
            f"no engine with a control socket runs as this user; looked in {places}. An engine has none with "
            '"control_socket": false, and one in a container has its own folder'
        )


class PinLimitError(ControlError):
    """More blocks of host memory would be pinned than may be.

    Attributes:
        num_new: blocks that were to be pinned and are not yet.
        num_pinned: blocks that are.
        limit: the most that may be.
    """

    def __init__(self, num_new: int, num_pinned: int, limit: int) -> None:
        self.num_new = num_new
        self.num_pinned = num_pinned
        self.limit = limit
        super().__init__(
            f"{num_new} blocks cannot be pinned: {num_pinned} of at most {limit}, a tenth of host memory, are pinned; "
            "unpin others, pin a shorter prefix, or raise cpu_bytes_to_use"
        )


class TraceError(KVTierError, ValueError):
    """A request trace cannot be read.

    Attributes:
        path: the file.
        line: number of the line, from 1; None for the file as a whole.
        value: the value in the file; None where the remedy says everything.
        remedy: what was expected and what to do.
    """

    def __init__(self, path: object, line: int | None, value: object, remedy: str) -> None:
        self.path = str(path)
        self.line = line
        self.value = redact("", value)
        self.remedy = remedy
        name = self.path if len(self.path) <= MAX_PATH_CHARS else f"...{self.path[-MAX_PATH_CHARS:]}"
        name = hide_secrets(name)
        place = name if line is None else f"{name}:{line}"
        super().__init__(": ".join((place, *(() if value is None else (shorten(value),)), remedy)))


class RecordError(KVTierError, ValueError):
    """A record of a request, from a recording or a control socket, cannot be read.

    Attributes:
        value: the record.
        reason: what is wrong with it.
    """

    def __init__(self, value: object, reason: str) -> None:
        self.value = redact("", value)
        self.reason = reason
        super().__init__(
            f"{shorten(value)}: not a record of a request ({reason}): read it with the kvtier that wrote it"
        )


class RestartError(KVTierError, RuntimeError):
    """The demo's second process ended before it answered every request.

    Attributes:
        status: its exit status; negative when a signal ended it.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"the restarted process ended with status {status}: {message or 'no error output'}")


class SimulationDiedError(KVTierError, RuntimeError):
    """A process ended before its simulation did.

    Attributes:
        num_processes: how many ran at the same time.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        super().__init__(
            f"one of {num_processes} simulation processes was killed (out of memory?): "
            "lower the number of processes"
        )


class EventMessageError(KVTierError, ValueError):
    """A received message is not one of vLLM's KV-event publisher.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"not a message of a KV-event publisher ({reason}): is another service at the endpoint?"
        )
