"""The control socket of a scheduler half: what it shows of the engine, and commands that wait for the engine's step.

Two threads meet here. The scheduler's thread reads ``is_wanted`` at the end of each step and calls ``on_step_end``
where it is true; there it publishes a snapshot that a client waits for, and advances commands. The server's thread
takes requests and replies. An idle engine makes no step: then the server's thread reads the counters itself. They are
plain numbers that nothing changes meanwhile, so the answer is exact, and says that the engine did not step. Commands
change the manager, which only the scheduler's thread may do, so they wait for the next step or their client's time-out;
an engine that can be woken makes that step at once.
"""

import logging
import os
import shlex
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvtier.base import OffloadingSpec
from kvtier.config import OffloadingConfig
from kvtier.connector.features import StepControl
from kvtier.connector.protocols import ControlledHalf
from kvtier.connector.request_state import RequestState
from kvtier.errors import ControlError, KVTierError
from kvtier.namespace import describe_groups
from kvtier.observe.control_commands import Command, PromptHasher, make_command, read_number
from kvtier.observe.control_server import Ask, ControlServer
from kvtier.observe.control_wire import Message, make_control_folder
from kvtier.operating import __version__
from kvtier.tenants import make_tenants

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the requests and replies."""

STEP_WAIT_S = 0.3
"""Seconds that a request for numbers waits for a step before it reads the counters itself. Longer makes an idle engine
slow to ask; shorter reads beside steps of a hundred milliseconds."""

FRESH_S = 0.2
"""Age up to which a snapshot is given to the next client too, so that many of them cost an engine one."""

MAX_RECORDS = 1000
MAX_COMMANDS = 64
"""Commands that wait for a step. Each client has one."""

DEFAULT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 3600.0

READ_TRIES = 10
"""How often the server's thread reads the counters again when a step has begun meanwhile."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters and gauges at the end of a step.

    Attributes:
        stats: by dotted name.
        taken_s: the clock's reading.
    """

    stats: Mapping[str, float]
    taken_s: float


@dataclass(eq=False, slots=True)
class PendingCommand:
    """A command between both threads.

    The scheduler's thread sets ``reply`` and ``has_begun``, the server's ``is_cancelled``.
    """

    command: Command
    reply: Message | None = None
    has_begun: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A request whose reply is known at once."""

    reply: Message

    def poll(self) -> Message | None:
        """Return it."""
        return self.reply

    def cancel(self) -> None:
        """Do nothing."""


class EngineControl(StepControl):
    """What the scheduler half has for its operators. When the half is no longer referred to, the socket closes.

    Thread: ``attach``, ``on_step_end`` and ``close`` are called on the scheduler's thread, ``begin`` on the server's.
    Lists and numbers are handed over by single operations of the interpreter, which need no lock.

    Args:
        config: the engine's configuration.
        hash_prompt: makes the content hashes of token ids, for commands about a prefix; None where the engine does not
            offer it.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.

    Attributes:
        is_wanted: whether the end of the next step has something to do here.
        wake_engine: called on the server's thread when a command has come, so that an idle engine steps. It does
            nothing unless the engine has set it, and must not block or raise.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        hash_prompt: PromptHasher | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.is_wanted = False
        self.wake_engine: Callable[[], None] = do_nothing
        self._hash_prompt = hash_prompt
        self._tenants = make_tenants(config.settings)
        self._clock = clock
        self._began_s = clock()
        self._description = describe_engine(config, wall_clock())
        self._half: Callable[[], ControlledHalf | None] = lambda: None
        self._server: ControlServer | None = None
        self._snapshot: Snapshot | None = None
        self._is_snapshot_wanted = False
        self._arrived: deque[PendingCommand] = deque()
        self._open: list[PendingCommand] = []

    @property
    def has_commands(self) -> bool:
        return bool(self._arrived or self._open)

    def listen(self, make_server: Callable[["EngineControl"], ControlServer]) -> None:
        """Open the socket.

        Raises:
            ControlError: it cannot be opened.
            OSError: the same.
        """
        self._server = make_server(self)

    def attach(self, half: ControlledHalf) -> "EngineControl":
        server = self._server
        self._half = weakref.ref(half, lambda _: None if server is None else server.close_soon())
        return self

    def on_step_end(self) -> None:
        if not self.is_wanted:
            return
        self.is_wanted = False
        half = self._half()
        if half is None:
            return
        if self._is_snapshot_wanted:
            self._is_snapshot_wanted = False
            self._snapshot = Snapshot(half.stats(), self._clock())
        with suppress(IndexError):  # the server's thread may take a cancelled one out meanwhile
            while self._arrived:
                self._open.append(self._arrived.popleft())
        if self._open:
            self._open = [pending for pending in self._open if not self._advance(pending, half)]
            self.is_wanted = bool(self._open)
        if self._server is not None:
            self._server.wake()

    def close(self, unfinished: Collection[RequestState] = ()) -> None:
        if self._server is not None:
            self._server.close()
        half = self._half()
        for pending in self._open:
            if half is not None:
                pending.command.abandon(half)
        self._open.clear()

    def begin(self, request: Message) -> Ask:
        """Start to answer a client's request.

        Raises:
            ControlError: it is not one that the engine knows, or an argument is wrong.
        """
        name = request.get("do")
        if name == "hello":
            return Answered({"ok": True, **self._description, "uptime_s": self._clock() - self._began_s})
        if name == "stats":
            return StatsAsk(self)
        if name == "recent":
            return Answered(self._list_records(request))
        timeout_s = read_number(request, "timeout_s", DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S)
        command = make_command(name, request, self._hash_prompt, self._tenants)
        if len(self._arrived) >= MAX_COMMANDS:
            raise ControlError(f"{MAX_COMMANDS} commands wait for the engine's next step: try again later")
        pending = PendingCommand(command)
        self._arrived.append(pending)
        self.is_wanted = True
        self.wake_engine()  # only now: an engine that wakes up looks for commands
        return CommandAsk(self, pending, str(name), timeout_s)

    def now_s(self) -> float:
        """Return the clock's reading."""
        return self._clock()

    def request_snapshot(self) -> None:
        """Have the next step publish a snapshot."""
        self._is_snapshot_wanted = True
        self.is_wanted = True

    def find_snapshot(self, oldest_s: float) -> Snapshot | None:
        """Return the last snapshot if it was taken at or after ``oldest_s``."""
        found = self._snapshot
        return found if found is not None and found.taken_s >= oldest_s else None

    def read_now(self) -> Mapping[str, float]:
        """Return the counters as another thread sees them.

        Raises:
            ControlError: the engine has ended, or changes them all the time.
        """
        for _ in range(READ_TRIES):
            half = self._half()
            if half is None:
                raise ControlError("the engine has not begun, or has ended")
            try:
                return half.stats()
            except RuntimeError:  # a dictionary grew under the reader: a step has begun
                continue
        raise ControlError("the counters change too fast to be read beside the engine's steps: try again")

    def cancel(self, pending: PendingCommand) -> None:
        """Drop a command; what it has begun is undone at the next step's end."""
        pending.is_cancelled = True
        with suppress(ValueError, IndexError):  # it has begun, or is about to
            self._arrived.remove(pending)
        self.is_wanted = True

    def _list_records(self, request: Message) -> Message:
        half = self._half()
        num_wanted = int(read_number(request, "n", MAX_RECORDS, MAX_RECORDS))
        records = [] if half is None or not num_wanted else half.records.latest[-num_wanted:]
        return {"ok": True, "records": [record.to_json() for record in records]}

    def _advance(self, pending: PendingCommand, half: ControlledHalf) -> bool:
        """Go on with a command; return whether it has ended."""
        pending.has_begun = True
        try:
            if pending.is_cancelled:
                pending.command.abandon(half)
                return True
            pending.reply = pending.command.advance(half, self._clock())
        except KVTierError as error:
            pending.reply = {"ok": False, "error": str(error)}
        except Exception as error:  # foreign tiers take part; an engine must not end by it
            logger.exception("a command of the control socket failed")
            pending.reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return pending.reply is not None


class StatsAsk:
    """A request for counters: answered by the next step, or from idle counters."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._began_s = control.now_s()
        if control.find_snapshot(self._began_s - FRESH_S) is None:
            control.request_snapshot()

    def poll(self) -> Message | None:
        """Return the counters when a step has published them, or when no step came."""
        snapshot = self._control.find_snapshot(self._began_s - FRESH_S)
        if snapshot is not None:
            return {"ok": True, "is_stepping": True, "stats": snapshot.stats}
        if self._control.now_s() - self._began_s < STEP_WAIT_S:
            return None
        try:
            return {"ok": True, "is_stepping": False, "stats": self._control.read_now()}
        except ControlError as error:
            return {"ok": False, "error": str(error)}

    def cancel(self) -> None:
        """Do nothing: the next step publishes at no harm."""


class CommandAsk:
    """A command that waits for the engine's steps, until its client's time-out."""

    def __init__(self, control: EngineControl, pending: PendingCommand, name: str, timeout_s: float) -> None:
        self._control = control
        self._pending = pending
        self._name = name
        self._timeout_s = timeout_s
        self._end_s = control.now_s() + timeout_s

    def poll(self) -> Message | None:
        """Return the command's reply, or that it has taken too long."""
        pending = self._pending
        if pending.reply is not None or self._control.now_s() < self._end_s:
            return pending.reply
        self.cancel()
        if pending.has_begun:
            progress = pending.command.describe_progress()
            return {"ok": False, "error": f"{self._name} has not ended in {self._timeout_s:g} s: {progress}"}
        return {
            "ok": False,
            "error": f"the engine made no step in {self._timeout_s:g} s, so {self._name} has not begun and will not: "
            "an idle engine that cannot be woken steps with its next request; send one, or give a longer --timeout",
        }

    def cancel(self) -> None:
        """Drop the command."""
        self._control.cancel(self._pending)


def do_nothing() -> None:
    """Stand in for what wakes an engine, where nothing can."""


def open_control(config: OffloadingConfig, hash_prompt: PromptHasher | None = None) -> EngineControl | None:
    """Return the control of an engine's scheduler half, listening; None where it is off or cannot listen.

    Args:
        config: the engine's configuration; its setting ``control_socket`` switches it off.
        hash_prompt: as EngineControl's.
    """
    if not config.settings.control_socket:
        return None
    control = EngineControl(config, hash_prompt)
    name = config.settings.instance_id or config.engine_id
    try:
        control.listen(lambda handler: ControlServer(make_control_folder(), name, handler))
    except (ControlError, OSError) as error:
        # An engine serves without its operators.
        logger.warning("no control socket, so `kvtier ps` does not see this engine: %s", error)
        return None
    return control


def describe_engine(config: OffloadingConfig, started_s: float) -> Message:
    """Return what a control socket says of its engine; nothing in it is a secret. Pure but for the process's id."""
    settings = config.settings
    tenants = make_tenants(settings)
    return {
        "protocol": PROTOCOL,
        "id": settings.instance_id or config.engine_id,
        "pid": os.getpid(),
        "engine": config.engine_kind,
        "model": config.model.name,
        "dtype": config.model.dtype,
        "started_s": started_s,
        "block_tokens": [group.block_size_tokens * config.block_size_factor for group in config.groups],
        "eviction_policy": settings.eviction_policy,
        "metrics": describe_metrics_page(config),
        "tiers": [str(tier.get("type", "")) for tier in settings.secondary_tiers],
    } | ({} if tenants is None else {"tenants": tenants.list_quotas()})


def describe_metrics_page(config: OffloadingConfig) -> str:
    """Return the address of the engine's own metrics page; empty where the settings name no port. Pure."""
    settings = config.settings
    # 0 is a free port that nothing here knows; with data parallelism other ranks have the ports behind the first.
    return f"http://{settings.metrics_host}:{settings.metrics_port}/metrics" if settings.metrics_port else ""


def describe_start(spec: OffloadingSpec, engine: str, control: EngineControl | None) -> list[str]:
    """Return what an engine logs once it has started: that it works, with what, and how to watch it.

    Each line begins with ``kvtier``, so that a search of the log for that word shows the start.

    Args:
        spec: of the scheduler half, which is built.
        engine: name and version of the engine, for people.
        control: what serves operators; None when nothing does.
    """
    config = spec.config
    name = config.settings.instance_id or config.engine_id
    watch = f"watch it with: kvtier top {shlex.quote(name)}"
    if control is None:
        watch = "it has no control socket, so kvtier top cannot watch it"
    page, layers = describe_metrics_page(config), describe_groups(config.groups)
    return [
        f"kvtier {__version__} keeps the KV cache of {config.model.name} ({layers}) for {engine}",
        *(f"kvtier: {line}" for line in spec.describe_start()),
        f"kvtier: instance {name}, {watch}" + (f"; metrics: {page}" if page else ""),
    ]
