"""What a command line of llama-server means: what is added, refused by name, and part of the identity."""

import os
import socket
from pathlib import Path

import pytest

from kvtier.cli.llama import parse_address, read_config
from kvtier.engines.llamacpp.command_line import (
    ServerCommand,
    find_parts,
    find_refusals,
    find_running,
    find_warnings,
    make_command,
    name_arguments,
)
from kvtier.engines.llamacpp.serve import find_api_key, plan_start
from kvtier.engines.llamacpp.settings import LlamaSettings
from kvtier.errors import ConfigError, UnknownNameError


def command(*arguments: str, **environ: str) -> ServerCommand:
    return ServerCommand(("llama-server", *arguments), environ, Path("/work"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--swa-full",),
        ("--context-shift",),
        ("--cache-reuse", "256"),
        ("-md", "draft.gguf"),
        ("--spec-type", "ngram-simple"),
        ("--models-dir", "/models"),
        ("--no-slots",),
        ("--ssl-key-file", "key.pem"),
        ("--ctx-checkpoints", "0"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_cannot_be_kept_is_refused_by_name(arguments: tuple[str, ...]) -> None:
    name = {"-md": "--model-draft"}.get(arguments[0], arguments[0])
    assert any(name in text for text in find_refusals(command("-m", "model.gguf", *arguments)))


@pytest.mark.parametrize(
    "arguments", [(), ("--cache-reuse", "0"), ("--spec-type", "none"), ("-c", "8192", "-fa", "on")], ids=str
)
def test_what_can_be_kept_is_not_refused(arguments: tuple[str, ...]) -> None:
    assert find_refusals(command("-m", "model.gguf", *arguments)) == []


def test_variables_are_refused_as_their_arguments_are() -> None:
    found = find_refusals(
        command(LLAMA_ARG_MODEL="m.gguf", LLAMA_ARG_SWA_FULL="1", LLAMA_ARG_CONTEXT_SHIFT="0")
    )
    assert len(found) == 1
    assert found[0].startswith("LLAMA_ARG_SWA_FULL")


def test_a_router_is_refused() -> None:
    assert "--model" in find_refusals(command())[0]


def test_the_front_takes_the_servers_place() -> None:
    made = make_command(
        command("-m", "m.gguf", "--port", "9000", "--host", "192.0.2.7", "-c", "-1"),
        Path("/slots"),
        "127.0.0.1",
        7000,
    )
    assert made == [
        "llama-server", "-m", "m.gguf", "-c", "-1", "--slot-save-path", "/slots/", "--host", "127.0.0.1", "--port",
        "7000", "--cache-ram", "0",
    ]  # fmt: skip


def test_a_cache_in_memory_that_the_user_wants_stays() -> None:
    made = make_command(command("-m", "m.gguf", "-cram", "512"), Path("/slots"), "127.0.0.1", 7000)
    assert made.count("--cache-ram") == 0
    assert "-cram" in made


def test_unknown_arguments_are_part_of_the_identity_and_harmless_ones_are_not() -> None:
    named = name_arguments(
        command(
            "-m", "m.gguf", "-t", "4", "--rope-scale", "2", "--new-thing", "x", LLAMA_ARG_YARN_ORIG_CTX="9"
        )
    )
    assert named == {"--rope-scale": ["2"], "--new-thing": ["x"], "LLAMA_ARG_YARN_ORIG_CTX": ["9"]}


def test_a_running_server_without_a_slash_is_told_so() -> None:
    assert "slash" in find_warnings(command("-m", "m", "--slot-save-path", "/slots"), None)[0]
    assert "--slot-save-path" in find_warnings(command("-m", "m"), None)[0]
    assert find_warnings(command("-m", "m", "--slot-save-path", "/slots/"), Path("/slots")) == []
    assert "same directory" in find_warnings(command("-m", "m", "--slot-save-path", "/slots/"), Path("/x"))[0]


def test_a_model_in_several_files_has_them_all() -> None:
    names = [path.name for path in find_parts(Path("/m/a-00001-of-00003.gguf"))]
    assert names == ["a-00001-of-00003.gguf", "a-00002-of-00003.gguf", "a-00003-of-00003.gguf"]
    assert find_parts(Path("/m/a.gguf")) == [Path("/m/a.gguf")]


def test_the_command_line_of_a_process_that_listens_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = find_running(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert found is not None
    assert found.folder == Path.cwd()
    assert "python" in os.path.basename(found.arguments[0])  # noqa: PTH119


def test_a_server_on_another_host_is_not_looked_for() -> None:
    assert find_running("http://192.0.2.1:8080") is None


def test_keys_are_found_where_the_server_has_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    assert find_api_key(command("-m", "m", "--api-key", "a,b")) == "a"
    assert find_api_key(command("-m", "m", "--api-key-file", str(keys))) == "one"
    assert find_api_key(command("-m", "m")) == ""


def test_a_refused_command_line_starts_nothing() -> None:
    with pytest.raises(ConfigError, match="swa-full"):
        plan_start(["llama-server", "-m", "m", "--swa-full"], None, None, LlamaSettings(), {})


def test_settings_come_from_options_or_a_file(tmp_path: Path) -> None:
    _, plain = read_config(None, tmp_path, "1GiB", "64MiB")
    assert plain["secondary_tiers"][0]["root_dir"] == str(tmp_path.resolve())
    path = tmp_path / "kvtier.json"
    path.write_text('{"cpu_bytes_to_use": "2GiB", "llama": {"block_tokens": 32}}')
    own, settings = read_config(path, None, "1GiB", "64MiB")
    assert (own.block_tokens, settings["cpu_bytes_to_use"]) == (32, "2GiB")
    path.write_text('{"llama": {"block_token": 32}}')
    with pytest.raises(UnknownNameError, match="block_tokens"):
        read_config(path, None, "1GiB", "64MiB")
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="object"):
        read_config(path, None, "1GiB", "64MiB")


def test_addresses_are_read_or_refused() -> None:
    assert parse_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("80", "host:", ":80", "host:99999"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_address(text)
