"""Follows an engine core through sleep and new weights, so that a reset is one only when a user asks for it.

vLLM resets a connector when its engine falls asleep, because it empties its own cache, and does not say why it resets.
It says nothing of new weights. So the calls of ``EngineCore`` that matter are wrapped, in the process that has the
scheduler (docs/adr/0043). Each runs as before; what it does to kvtier:

- ``sleep`` of level 1 or 2, ``release_kv_cache_memory``: the workers end their copies and let go of the KV caches, and
  what is held stays. ``wake_up``: they use the KV caches again, before the next step.
- a call that has changed weights: the engine goes on in the namespace of the new ones, which other engines share. The
  same weights change nothing. Where nothing names them their blocks stay in host memory, until others are loaded.
- as long as the device's prefix cache may have blocks of the old weights nothing is stored or found.

All of it is off, and each reset is one, where weights can change unseen: in an engine in the process of the program
that uses it, and behind an executor of the user's own.

The busy loop of an idle engine waits for its next request, and a command of an operator for its next step
(docs/adr/0030). To end an idle engine vLLM puts a message into the loop's queue that only lets the loop ask again
whether there is work. A command is work, so the connector's control learns to send that message when a loop begins.

Source: ``EngineCore`` of vLLM 0.32, whose busy loop makes all of these calls between two steps.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.config import ModelIdentity
from kvtier.engines.vllm.loaded_weights import AS_STARTED, LoadedWeights, Weights
from kvtier.engines.vllm.worker_hooks import WorkerHooks

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

logger = logging.getLogger(__name__)

KNOWN_EXECUTORS = frozenset({"mp", "ray", "uni"})
"""Executors whose workers are reached through the engine core alone."""

WATCHED = "_kvtier_watched"
"""Marks a class of vLLM's whose methods are wrapped."""


class Executor(Protocol):
    """The part of vLLM's executor that is used."""

    def collective_rpc(
        self, method: Callable[[Any], Any]
    ) -> list[Any]:  # Any: a worker, and what is returned
        """Call a function with each worker, and return the results in the order of ranks."""


class Offloader(Protocol):
    """What forgets, and goes on with other weights: the scheduler's half of the connector."""

    def reset(self) -> None:
        """Forget every block, and store in an epoch of its own."""

    def switch_model(self, model: ModelIdentity | None) -> None:
        """Forget every block, and go on with those of ``model``; None for weights that nothing names."""


class WeightsNamer(Protocol):
    """Finds the identity of weights that were loaded in place."""

    def before_load(self, path: str) -> None:
        """Note the state of the files in a folder, or of those of the engine's start, which will be read now."""

    def name(self, weights: Weights, executor: Executor) -> ModelIdentity | None:
        """Return the identity; None when nothing names the weights. Blocks while they are read."""


class EngineWatch:
    """What one connector does when its engine sleeps or gets new weights. Used from the scheduler's thread.

    Args:
        offloader: the connector's half.
        namer: names weights.
        started: the identity of the engine's start.

    Attributes:
        weights: what is known of the weights.
        is_clearing: whether the engine itself, and no user, empties its caches now.
        falling_asleep: the level of sleep that the engine is about to enter; 0 when it is not.
    """

    def __init__(self, offloader: Offloader, namer: WeightsNamer, started: ModelIdentity) -> None:
        self.weights = LoadedWeights()
        self.is_clearing = False
        self.falling_asleep = 0
        self._offloader = offloader
        self._namer = namer
        self._in_effect: ModelIdentity | None = started
        self._reset_names: list[ModelIdentity] = []
        self._executor: Executor | None = None
        self._named: tuple[Weights, ModelIdentity | None] = AS_STARTED, started

    @property
    def is_held(self) -> bool:
        """Whether nothing may be stored or found, because blocks on the device may be of other weights."""
        return not self.weights.is_identified

    def on_core(self, executor: Executor) -> None:
        """Learn how to reach the workers."""
        self._executor = executor

    def on_step(self) -> None:
        """Note that the device has got blocks, computed or loaded."""
        if self.weights.is_asleep:  # an engine that steps is awake, however it was woken
            self.on_awake()
        self.weights.is_device_empty = False

    def on_reset(self) -> None:
        """Reset the connector, unless it is the engine that falls asleep."""
        level = self.falling_asleep
        if level and self.is_clearing and self._executor is not None:
            self.falling_asleep = 0
            try:
                self._executor.collective_rpc(release_kv_caches)
            except Exception as error:  # noqa: BLE001 - foreign: vLLM wraps what a worker raises, as it likes
                logger.warning("this sleep is a reset, because a worker keeps its KV cache: %s", error)
            else:
                self.weights.on_sleep(level)
                return
        if self._in_effect is None:
            self._offloader.switch_model(None)
            return
        self._reset_names.append(self._in_effect)
        self._offloader.reset()

    def on_device_reset(self) -> None:
        """Note that the device's prefix cache is empty."""
        self.weights.is_device_empty = True
        if not self.weights.is_asleep:
            self._identify()

    def on_awake(self) -> None:
        """Use the KV caches again, with the weights that are there now."""
        if not self.weights.is_asleep:
            return
        assert self._executor is not None, "it was reached when the engine fell asleep"
        self._executor.collective_rpc(use_kv_caches_again)
        self.weights.is_asleep = False
        self._identify()

    def before_call(self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Prepare for a call to all workers."""  # Any: a user's arguments
        path = self.weights.path_of_reload(args, kwargs) if method == "reload_weights" else None
        if path is not None:
            self._namer.before_load(path)

    def on_call(
        self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_failed: bool
    ) -> None:  # Any: as above
        """Follow a call to all workers that has ended."""
        if not self.weights.on_call(method, args, kwargs, has_failed=has_failed) or self.weights.is_asleep:
            return
        self._identify()

    def _identify(self) -> None:
        """Go on with the weights that are loaded now, as soon as the device has no blocks of others."""
        weights = self.weights
        if weights.is_identified:
            return
        assert self._executor is not None, "weights change in calls of the engine core"
        if weights.now is not self._named[0]:
            self._named = weights.now, self._namer.name(weights.now, self._executor)
        name = self._named[1]
        if name is not None and name == self._in_effect:
            logger.info("the weights are the same as before: everything that is held stays")
            weights.is_identified = True
        elif weights.is_device_empty:
            describe_switch(weights.now, name)
            self._in_effect = name
            self._offloader.switch_model(name)
            if name in self._reset_names:
                self._offloader.reset()  # what it stored of these weights before that reset must not be found again
            weights.is_identified = True
        else:
            logger.warning(
                "weights were loaded while the device's prefix cache has blocks of the old ones: kvtier neither stores "
                "nor finds any until it is reset (/reset_prefix_cache)"
            )
            self._offloader.switch_model(None)
            self._in_effect = None


def describe_switch(weights: Weights, name: ModelIdentity | None) -> None:
    """Log under which name the engine goes on."""
    if name is None:
        logger.warning(
            "nothing names the weights that are loaded now (%s): their blocks are kept in host memory alone",
            weights.origin.value,
        )
    else:
        logger.info(
            "other weights are loaded: %s %s", weights.path or name.name, name.weights or name.revision
        )


def release_kv_caches(worker: object) -> None:
    """End every copy of this worker's connectors and let go of the KV caches. Runs in the worker's process."""
    del worker
    for connector in connectors_here():
        connector.unregister_kv_caches()


def use_kv_caches_again(worker: object) -> None:
    """Let this worker's connectors use the KV caches again. Runs in the worker's process."""
    del worker
    for connector in connectors_here():
        connector.restore_kv_caches()


def connectors_here() -> Iterator[Any]:  # Any: KVTierConnector, which imports this file
    """Yield kvtier's connectors of this worker's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        yield from own_connectors(get_kv_transfer_group())


def own_connectors(connector: object) -> Iterator[Any]:  # Any: as above
    """Yield kvtier's connectors: this one, or those within vLLM's MultiConnector. Pure."""
    for one in getattr(connector, "_connectors", (connector,)):
        if isinstance(one, WorkerHooks):
            yield one


def watches_of(core: "EngineCore") -> list[EngineWatch]:
    """Return what kvtier's connectors of an engine want to know; nothing where weights can change unseen."""
    if not is_reached_by_calls_alone(core):
        return []
    watches = [one.engine_watch for one in own_connectors(getattr(core.scheduler, "connector", None))]
    for watch in watches:
        watch.on_core(core.model_executor)
    return watches


def is_reached_by_calls_alone(core: "EngineCore") -> bool:
    """Return whether the workers do only what the engine core tells them, so that no weights change unseen. Pure."""
    from vllm.v1.engine.core import EngineCoreProc

    backend = core.vllm_config.parallel_config.distributed_executor_backend
    return isinstance(core, EngineCoreProc) and backend in KNOWN_EXECUTORS


def watch_engine_cores() -> None:
    """Wrap the calls of this process's engine cores that concern kvtier; idempotent."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    if WATCHED in vars(EngineCore):
        return
    setattr(EngineCore, WATCHED, True)
    wrappers = {
        "sleep": watch_sleep,
        "release_kv_cache_memory": watch_release,
        "wake_up": watch_wake_up,
        "reset_prefix_cache": watch_device_reset,
        "_reset_caches": watch_clearing,
        "collective_rpc": watch_calls,
    }
    # Without the internal method sleep cannot be told from a reset that a user asks for: then it stays one.
    if hasattr(EngineCore, "_reset_caches"):
        for name, wrap in wrappers.items():
            if hasattr(EngineCore, name):
                setattr(EngineCore, name, wrap(getattr(EngineCore, name)))
    # A release without the message ends an idle engine in another way; there a command waits for a request.
    wake_up = getattr(EngineCoreRequestType, "WAKEUP", None)
    for kind in (EngineCoreProc, DPEngineCoreProc):
        if wake_up is not None and "run_busy_loop" in vars(kind):
            kind.run_busy_loop = watch_loop(kind.run_busy_loop, wake_up)


Method = Callable[..., Any]  # Any: what a method of vLLM takes and returns


def watch_sleep(stock: Method) -> Method:
    """Wrap ``sleep``, which may end later, when the running requests have."""

    @functools.wraps(stock)
    def sleep(self: "EngineCore", level: int = 1, *args: object, **kwargs: object) -> object:
        watches = watches_of(self)
        fall_asleep(watches, level)
        ending = None
        try:
            ending = stock(self, level, *args, **kwargs)
        finally:
            if isinstance(ending, Future):
                ending.add_done_callback(lambda _: fall_asleep(watches, 0))
            else:
                fall_asleep(watches, 0)
        return ending

    return sleep


def watch_release(stock: Method) -> Method:
    """Wrap ``release_kv_cache_memory``, after which the weights are still there."""

    @functools.wraps(stock)
    def release(self: "EngineCore", *args: object, **kwargs: object) -> object:
        watches = watches_of(self)
        fall_asleep(watches, 1)
        try:
            return stock(self, *args, **kwargs)
        finally:
            fall_asleep(watches, 0)

    return release


def fall_asleep(watches: Sequence[EngineWatch], level: int) -> None:
    """Take the engine's next own reset for its falling asleep; with level 0 for a reset again."""
    for watch in watches:
        watch.falling_asleep = level


def watch_wake_up(stock: Method) -> Method:
    """Wrap ``wake_up``, which may leave a part asleep."""

    @functools.wraps(stock)
    def wake_up(self: "EngineCore", *args: object, **kwargs: object) -> object:
        result = stock(self, *args, **kwargs)
        if not self.model_executor.is_sleeping:
            for watch in watches_of(self):
                watch.on_awake()
        return result

    return wake_up


def watch_device_reset(stock: Method) -> Method:
    """Wrap ``reset_prefix_cache``, which says whether the device's prefix cache is empty now."""

    @functools.wraps(stock)
    def reset_prefix_cache(self: "EngineCore", *args: object, **kwargs: object) -> object:
        is_empty = stock(self, *args, **kwargs)
        if is_empty:
            for watch in watches_of(self):
                watch.on_device_reset()
        return is_empty

    return reset_prefix_cache


def watch_clearing(stock: Method) -> Method:
    """Wrap what the engine itself empties its caches with."""

    @functools.wraps(stock)
    def reset_caches(self: "EngineCore", *args: object, **kwargs: object) -> object:
        watches = watches_of(self)
        for watch in watches:
            watch.is_clearing = True
        try:
            return stock(self, *args, **kwargs)
        finally:
            for watch in watches:
                watch.is_clearing = False

    return reset_caches


def watch_calls(stock: Method) -> Method:
    """Wrap ``collective_rpc``, with which users reach all workers."""

    @functools.wraps(stock)
    def collective_rpc(
        self: "EngineCore",
        method: object,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        watches = watches_of(self)
        for watch in watches:
            watch.before_call(method, args, kwargs or {})
        has_failed = True
        try:
            result = stock(self, method, timeout, args, kwargs)
            has_failed = False
        finally:
            for watch in watches:
                watch.on_call(method, args, kwargs or {}, has_failed=has_failed)
        return result

    return collective_rpc


def watch_loop(stock: Method, wake_up: object) -> Method:
    """Wrap ``run_busy_loop``, which begins when the engine has its queue and its connector."""

    @functools.wraps(stock)
    def run_busy_loop(self: "EngineCoreProc") -> object:
        queue = self.input_queue
        for connector in own_connectors(getattr(self.scheduler, "connector", None)):
            if connector.control is not None:
                connector.control.wake_engine = lambda: queue.put_nowait((wake_up, None))
        return stock(self)

    return run_busy_loop
