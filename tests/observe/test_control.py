"""What operators ask is answered beside the engine's steps, idle or not, and never by changing it from their thread."""

import gc
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.connector.fakes import FakeSpec, make_config
from tests.observe.conftest import MakeControlled
from tests.observe.controlled import GUARD_S, Background, Engine, connect, is_dropped

from kvtier.connector.common import ConnectorRole
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ConfigError, ControlError, UnknownNameError
from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord
from kvtier.observe.control import FRESH_S, open_control
from kvtier.observe.control_client import (
    EngineConnection,
    choose_instance,
    find_instances,
    list_sockets,
    read_records,
)
from kvtier.observe.control_wire import encode
from kvtier.testing.clock import ManualClock

PROMPT = list(range(17))

DRAINED = {"ok": True, "num_lost_blocks": 0, "num_pending_blocks": 0}


def answer_once(listener: socket.socket, reply: dict[str, object]) -> None:
    listener.settimeout(GUARD_S)
    with listener.accept()[0] as client:
        client.recv(4096)
        client.sendall(encode(reply))


def record(number: int) -> RequestRecord:
    run = MissedRun(8, 9, Miss(MissCause.EVICTED, "host", {"after_s": 4.5}))
    return RequestRecord(f"request-{number}", 100.0 + number, 17, {"device": 4, "fs": 4}, (run,), 0.25, None)


def test_an_engine_says_who_it_is(make_controlled: MakeControlled) -> None:
    engine = make_controlled("first")
    hello = engine.ask("hello")

    assert (hello["id"], hello["model"], hello["block_tokens"]) == ("first", "model", [4])
    assert hello["uptime_s"] >= 0


def test_an_idle_engine_s_counters_are_read_as_they_are(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    engine.store("a", PROMPT)
    reply = engine.ask("stats")

    assert reply["is_stepping"] is False
    assert reply["stats"] == engine.half.stats()
    assert reply["stats"]["primary.held_blocks"] == 4.0


def test_a_stepping_engine_publishes_what_a_client_waits_for(make_controlled: MakeControlled) -> None:
    engine = make_controlled(clock=ManualClock())  # however long the next step takes to come
    engine.store("a", PROMPT)
    client = Background(lambda: engine.ask("stats"))
    while client.is_running:
        engine.step()
        time.sleep(0)
    reply = client.join()

    assert isinstance(reply, dict)
    assert reply["is_stepping"] is True
    assert reply["stats"]["primary.held_blocks"] == 4.0


def test_numbers_are_given_again_for_a_moment_and_then_read_anew(make_controlled: MakeControlled) -> None:
    clock = ManualClock()
    engine = make_controlled(clock=clock)
    engine.control.begin({"do": "stats"})
    engine.step()
    engine.store("a", PROMPT)
    held = [engine.control.begin({"do": "stats"}).poll()]
    clock.advance(FRESH_S + 0.1)
    ask = engine.control.begin({"do": "stats"})
    held.append(ask.poll())
    engine.step()
    held.append(ask.poll())

    assert [reply and reply["stats"]["primary.held_blocks"] for reply in held] == [0.0, None, 4.0]


def test_a_command_wakes_an_idle_engine_that_can_be_woken(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    engine.store("a", PROMPT)
    engine.step()
    woken = threading.Event()
    engine.control.wake_engine = lambda: woken.set() if engine.control.has_commands else None
    client = Background(lambda: engine.ask("drain", GUARD_S))
    assert woken.wait(GUARD_S)
    while client.is_running:
        engine.step()
        time.sleep(0)

    assert client.join() == DRAINED


def test_numbers_do_not_wake_an_idle_engine(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    woken = threading.Event()
    engine.control.wake_engine = woken.set

    assert engine.ask("stats")["is_stepping"] is False
    assert not woken.is_set()


def test_a_step_that_no_client_waits_for_does_not_gather_numbers(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    engine.step()

    assert not engine.control.is_wanted
    assert engine.control.find_snapshot(0.0) is None


def test_the_last_records_come_back_as_they_were(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    engine.give_records(*map(record, range(30)))

    assert read_records(engine.path, 20) == [record(number) for number in range(10, 30)]


def test_a_client_that_waits_at_shutdown_is_let_go(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    client = Background(lambda: engine.ask("drain"))
    while not engine.control.has_commands:
        time.sleep(0)
    engine.close()

    assert "has ended" in str(client.join())
    assert not engine.path.exists()


def test_a_command_that_no_step_reaches_says_so_and_never_runs(make_controlled: MakeControlled) -> None:
    engine = make_controlled()

    with pytest.raises(ControlError, match=r"made no step in 0\.05 s, so drain has not begun"):
        engine.ask("drain", 0.05)
    assert not engine.control.has_commands


def test_drain_waits_for_open_stores(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    engine.store("a", PROMPT)
    client = Background(lambda: engine.ask("drain"))
    while client.is_running:
        engine.step()
        time.sleep(0)

    assert client.join() == DRAINED


def test_an_unknown_command_names_the_nearest(make_controlled: MakeControlled) -> None:
    with pytest.raises(ControlError, match="unknown command 'drian': did you mean 'drain'"):
        make_controlled().ask("drian")


@pytest.mark.parametrize("arguments", [{"n": -1}, {"n": "x"}, {"n": True}, {"n": None}, {"n": 1e9}])
def test_a_wrong_number_is_refused(make_controlled: MakeControlled, arguments: dict[str, object]) -> None:
    with pytest.raises(ControlError, match="must be a number from 0"):
        make_controlled().ask("recent", **arguments)


def test_a_command_beyond_the_time_limit_is_refused(make_controlled: MakeControlled) -> None:
    with connect(make_controlled().path) as client:
        client.sendall(b'{"do":"drain","timeout_s":1e300}\n')
        assert b"must be a number from 0 to 3600" in client.recv(65536)


def test_a_reset_meanwhile_changes_nothing_for_clients(make_controlled: MakeControlled) -> None:
    engine = make_controlled()
    engine.store("a", PROMPT)
    engine.half.reset()

    assert engine.ask("stats")["stats"]["primary.held_blocks"] == 0.0


def test_an_engine_that_is_dropped_without_shutdown_closes_its_socket(folder: Path) -> None:
    engine = Engine(folder)
    path, server = engine.path, engine.server
    with connect(path) as client:
        del engine
        gc.collect()
        assert is_dropped(client)
    server._thread.join(GUARD_S)

    assert not server._thread.is_alive()
    assert not path.exists()


def test_two_engines_are_two_instances_and_have_to_be_named(
    make_controlled: MakeControlled, folder: Path
) -> None:
    make_controlled("first"), make_controlled("second")

    assert sorted(one.id for one in find_instances([folder])) == ["first", "second"]
    assert choose_instance("sec", [folder]).id == "second"
    with pytest.raises(ControlError, match="2 engines run, name one of them: first, second"):
        choose_instance(None, [folder])
    with pytest.raises(UnknownNameError, match="unknown engine 'frist': did you mean 'first'"):
        choose_instance("frist", [folder])


def test_the_only_engine_need_not_be_named(make_controlled: MakeControlled, folder: Path) -> None:
    make_controlled("first")

    assert choose_instance(None, [folder]).id == "first"


def test_without_an_engine_the_error_says_where_it_looked(folder: Path) -> None:
    with pytest.raises(ControlError, match=f"looked in {folder}"):
        choose_instance(None, [folder])


def test_dead_sockets_are_removed_and_files_that_are_none_stay(
    make_controlled: MakeControlled, folder: Path
) -> None:
    engine = make_controlled("alive")
    (folder / "file.sock").touch()
    dead = Engine(folder, "dead")
    dead_path = dead.path
    dead.close()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead_path))

    assert [one.path for one in find_instances([folder])] == [engine.path]
    assert not dead_path.exists()
    assert (folder / "file.sock").exists()
    assert list_sockets([folder, folder / "missing"]) == [engine.path]


@pytest.mark.parametrize(
    "lie", [{"pid": "none"}, {"pid": None}, {"id": ["a"]}, {"started_s": "1"}, {"tiers": 3}]
)
def test_a_process_that_does_not_answer_as_an_engine_hides_no_other(
    make_controlled: MakeControlled, folder: Path, lie: dict[str, object]
) -> None:
    engine = make_controlled("alive")
    with socket.socket(socket.AF_UNIX) as liar:
        liar.bind(str(folder / "liar.sock"))
        liar.listen()
        lying = Background(lambda: answer_once(liar, {"ok": True, **lie}))

        assert [one.path for one in find_instances([folder])] == [engine.path]
        lying.join()


def test_a_process_that_accepts_and_says_nothing_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.observe.control_client.MARGIN_S", 0.0)
    path = folder / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        with (
            EngineConnection(path, 0.05) as connection,
            pytest.raises(ControlError, match=r"has not answered in 0\.05 s"),
        ):
            connection.ask("hello", 0.05)
        assert find_instances([folder], 0.05) == []
        assert path.exists()


def test_the_setting_switches_it_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))

    assert open_control(make_config(control_socket=False)) is None
    assert not (folder / "kvtier").exists()
    with pytest.raises(ConfigError, match="control_socket"):
        make_config(control_socket="no")


def test_an_engine_that_cannot_listen_serves_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.observe.control_wire.list_runtime_folders", lambda _: [Path("/proc/x/y")] * 2)

    assert open_control(make_config()) is None
    assert "no control socket" in caplog.text


def test_the_connector_alone_has_a_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    config = make_config(cpu_bytes_to_use="64KiB", instance_id="own")
    connector = OffloadingConnector(config, ConnectorRole.SCHEDULER, control=open_control(config))
    try:
        (instance,) = find_instances([folder / "kvtier"])
        assert instance.id == "own"
        assert not connector.has_pending_push_work()
        with connect(instance.path) as client:
            client.sendall(b'{"do":"drain"}\n')
            while not connector.has_pending_push_work():
                time.sleep(0)
    finally:
        connector.shutdown()
    assert find_instances([folder / "kvtier"]) == []


def test_a_connector_that_cannot_be_built_leaves_no_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    config = make_config()
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        OffloadingConnector(config, ConnectorRole.SCHEDULER, control=open_control(config))

    assert list((folder / "kvtier").iterdir()) == []


def test_a_scheduler_half_without_control_is_as_before() -> None:
    half = OffloadingConnectorScheduler(FakeSpec(make_config(), CPUOffloadingManager(4)))

    assert half.control is None
    half.shutdown()
