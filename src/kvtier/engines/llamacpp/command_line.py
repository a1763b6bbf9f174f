"""What llama-server's command line says: what kvtier adds, refuses and counts as part of the model's identity.

The server tells its clients neither its cache flags nor most of what changes keys and values, so its arguments are read
where they are: on kvtier's own command line, or in /proc of a server that runs. Every argument and every variable
``LLAMA_ARG_*`` is part of the identity but for those listed as harmless here. An unknown argument costs a miss.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

VARIABLE_PREFIX = "LLAMA_ARG_"

ALIASES = {
    "-m": "--model", "-hf": "--hf-repo", "-hfr": "--hf-repo", "-mu": "--model-url", "-c": "--ctx-size",
    "-md": "--model-draft", "--spec-draft-model": "--model-draft", "-hfd": "--hf-repo-draft",
    "-hfrd": "--hf-repo-draft", "--spec-draft-hf": "--hf-repo-draft", "-np": "--parallel", "-cram": "--cache-ram",
    "-mv": "--model-vocoder", "-fa": "--flash-attn", "-ctk": "--cache-type-k", "-ctv": "--cache-type-v",
    "-mm": "--mmproj", "-mmu": "--mmproj-url",
}  # fmt: skip

_HARMLESS_TEXT = (
    # Where the server listens, what it logs and shows, who may call it.
    "--host --port --reuse-port --path --api-prefix --webui --no-webui --ui --no-ui --webui-config --api-key "
    "--api-key-file --timeout -to --threads-http --alias -a --tags --metrics --slots --props --verbose -v "
    "--verbosity -lv --log-verbose --log-verbosity --log-file --log-disable --log-colors --log-prefix "
    "--log-timestamps --offline --hf-token -hft --embedding --embeddings --no-perf --perf "
    # Where it computes and with how much at once: other orders of the same sums.
    "--threads -t --threads-batch -tb --cpu-mask -C --cpu-range -Cr --cpu-strict --prio --poll --cpu-mask-batch -Cb "
    "--cpu-range-batch -Crb --cpu-strict-batch --prio-batch --poll-batch --batch-size -b --ubatch-size -ub "
    "--cont-batching -cb --no-cont-batching -nocb --numa --mlock --mmap --no-mmap --direct-io -dio --device -dev "
    "--gpu-layers -ngl --n-gpu-layers --split-mode -sm --tensor-split -ts --main-gpu -mg --cpu-moe -cmoe "
    "--n-cpu-moe -ncmoe --override-tensor -ot --no-kv-offload -nkvo --kv-offload -kvo --repack --no-repack -nr "
    "--no-host --op-offload --no-op-offload --check-tensors --warmup --no-warmup --fit -fit --fit-target -fitt "
    "--fit-ctx -fitc "
    # How many conversations and how long; a RoPE that depends on it is looked for in the model.
    "--ctx-size --parallel --kv-unified -kvu --no-kv-unified --slot-save-path --cache-ram --cache-idle-slots "
    "--no-cache-idle-slots --cache-prompt --no-cache-prompt --slot-prompt-similarity -sps --ctx-checkpoints -ctxcp "
    "--swa-checkpoints --checkpoint-every-n-tokens -cpent --checkpoint-min-step --keep --predict --n-predict -n "
    "--sleep-idle-seconds "
    # How text becomes tokens and tokens become text: records are named by tokens.
    "--jinja --no-jinja --chat-template --chat-template-file --chat-template-kwargs --reasoning-format "
    "--reasoning-budget --prefill-assistant --no-prefill-assistant --special -sp --reverse-prompt -r --escape -e "
    "--no-escape --spm-infill --ignore-eos --samplers --sampling-seq --sampler-seq --seed -s --temp --temperature "
    "--top-k --top-p --min-p --top-nsigma --xtc-probability --xtc-threshold --typical --repeat-last-n "
    "--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length "
    "--dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr "
    "--mirostat-ent --logit-bias -l --grammar --grammar-file --json-schema -j --json-schema-file -jf "
    "--backend-sampling -bs "
    # Named by their bytes or by the layout of slot files instead.
    "--model --hf-repo --hf-file -hff --model-url --cache-type-k --cache-type-v --lora --lora-scaled "
    "--lora-init-without-apply "
)

HARMLESS = frozenset(_HARMLESS_TEXT.split())
"""Arguments that do not change the keys and values of given tokens, or that are named in another way."""

_HARMLESS_VARIABLES_TEXT = (
    "HOST PORT MODEL MODEL_URL HF_REPO HF_FILE ALIAS TAGS THREADS THREADS_BATCH THREADS_HTTP BATCH UBATCH CTX_SIZE "
    "N_PARALLEL KV_UNIFIED N_GPU_LAYERS SPLIT_MODE TENSOR_SPLIT MAIN_GPU DEVICE CPU_MOE N_CPU_MOE NUMA MLOCK MMAP "
    "NO_MMAP NO_KV_OFFLOAD KV_OFFLOAD CONT_BATCHING NO_CONT_BATCHING TIMEOUT STATIC_PATH API_PREFIX WEBUI NO_WEBUI "
    "ENDPOINT_METRICS ENDPOINT_SLOTS ENDPOINT_PROPS NO_ENDPOINT_SLOTS JINJA CHAT_TEMPLATE CHAT_TEMPLATE_FILE "
    "N_PREDICT CACHE_TYPE_K CACHE_TYPE_V CACHE_RAM CTX_CHECKPOINTS SLOT_SAVE_PATH OFFLINE FIT "
)

HARMLESS_VARIABLES = frozenset(_HARMLESS_VARIABLES_TEXT.split())
"""The same for what follows ``LLAMA_ARG_`` in the names of variables."""

OFF = frozenset({"0", "off", "false", "disabled", "none", ""})
"""Values that switch an argument off."""


class Refused(NamedTuple):
    """Arguments with which conversations cannot be kept.

    Attributes:
        names: of the arguments.
        variable: what follows ``LLAMA_ARG_`` in the variable for the same; empty where there is none.
        reason: why, and what to do.
    """

    names: tuple[str, ...]
    variable: str
    reason: str


MOVED = "keys and values move to other tokens than they were computed for; leave it out"
ROUTER = "llama-server routes to others; give --model, and one front for each model"
TLS = "the front speaks plain HTTP at the root; put this before the front instead"
DRAFTS = ("--model-draft", "--hf-repo-draft", "--spec-type", "--lookup-cache-static", "-lcs", "-lcd")

REFUSED = (
    Refused(
        ("--swa-full",), "SWA_FULL", "llama-server gives wrong tokens after it restores a slot; leave it out"
    ),
    Refused(("--context-shift",), "CONTEXT_SHIFT", MOVED),
    Refused(("--cache-reuse",), "CACHE_REUSE", MOVED),
    Refused(DRAFTS, "MODEL_DRAFT", "slot files of a draft model are not known; leave it out"),
    Refused(("--models-dir", "--models-preset"), "MODELS_DIR", ROUTER),
    Refused(("--no-slots",), "NO_ENDPOINT_SLOTS", "the front must see the slots; leave it out"),
    Refused(("--ssl-key-file", "--ssl-cert-file", "--api-prefix"), "", TLS),
)

MODEL_ARGUMENTS = ("--model", "--hf-repo", "--model-url")

_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")
_SPLIT_FILE = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command line of a llama-server.

    Attributes:
        arguments: program and arguments.
        environ: its variables.
        folder: its working directory.
        executable: the program's file; None where it is not known.
    """

    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    folder: Path
    executable: Path | None = None

    def options(self) -> dict[str, list[str]]:
        """Return the values of each argument by its longest name; one that is repeated has them all."""
        found: dict[str, list[str]] = {}
        values: list[str] = []
        for text in self.arguments[1:]:
            if text.startswith("-") and len(text) > 1 and not _NUMBER.fullmatch(text):
                values = found.setdefault(ALIASES.get(text, text), [])
            else:
                values.append(text)
        return found

    def value(self, name: str, variable: str = "") -> str | None:
        """Return the last value of an argument, else that of its variable; None where neither is set."""
        values = self.options().get(name)
        if values is not None:
            return values[-1] if values else ""
        return self.environ.get(VARIABLE_PREFIX + variable) if variable else None

    def path(self, name: str) -> Path:
        """Return where a file lies that the server knows by a name."""
        return self.folder / name


def find_refusals(command: ServerCommand) -> list[str]:
    """Return why this server's conversations cannot be kept, one text each; none: they can. Pure."""
    options = command.options()
    found = [
        f"{name}: {refused.reason}"
        for refused in REFUSED
        for name in refused.names
        if name in options and (options[name] or ["on"])[-1].lower() not in OFF
    ]
    found += [
        f"{VARIABLE_PREFIX}{refused.variable}: {refused.reason}"
        for refused in REFUSED
        if refused.variable
        and command.environ.get(VARIABLE_PREFIX + refused.variable, "0").lower() not in OFF
    ]
    if not _names_model(command):
        found.append(f"no model is named: {ROUTER}")
    if command.value("--ctx-checkpoints", "CTX_CHECKPOINTS") == "0":
        found.append(
            "--ctx-checkpoints 0: without them a window or state can only be used at its end; leave it out"
        )
    return found


def find_warnings(command: ServerCommand, slot_folder: Path | None) -> list[str]:
    """Return what is wrong with a server that runs already, beside ``find_refusals``. Pure."""
    found = []
    slot_path = command.value("--slot-save-path", "SLOT_SAVE_PATH")
    if slot_path is None:
        found.append("--slot-save-path is not set: start llama-server with --slot-save-path DIR/")
    elif not slot_path.endswith("/"):
        found.append(
            f"--slot-save-path {slot_path} needs a slash at its end: llama-server appends file names to it"
        )
    elif slot_folder is not None and command.path(slot_path).resolve() != slot_folder.resolve():
        found.append(f"--slot-save-path is {slot_path}, and --slots {slot_folder}: give the same directory")
    return found


def make_command(command: ServerCommand, slot_folder: Path, host: str, port: int) -> list[str]:
    """Return the arguments with which the front starts the server. Pure.

    Args:
        command: what the user wrote.
        slot_folder: for slot files.
        host: where the server listens, for the front alone.
        port: the same.
    """
    replaced = {"--slot-save-path": f"{slot_folder}/", "--host": host, "--port": str(port)}
    kept: list[str] = [command.arguments[0]]
    is_skipped = False
    for text in command.arguments[1:]:
        if text.startswith("-") and not _NUMBER.fullmatch(text):
            is_skipped = ALIASES.get(text, text) in replaced
        if not is_skipped:
            kept.append(text)
    for name, value in replaced.items():
        kept += [name, value]
    # Otherwise the server empties every idle slot when a request starts, and keeps the KV where no one can save it.
    if command.value("--cache-ram", "CACHE_RAM") is None:
        kept += ["--cache-ram", "0"]
    return kept


def name_arguments(command: ServerCommand) -> dict[str, list[str]]:
    """Return the arguments and variables that are part of the identity. Pure."""
    named = {name: values for name, values in command.options().items() if name not in HARMLESS}
    for name, value in command.environ.items():
        if name.startswith(VARIABLE_PREFIX) and name[len(VARIABLE_PREFIX) :] not in HARMLESS_VARIABLES:
            named[name] = [value]
    return named


def find_parts(path: Path) -> list[Path]:
    """Return the files of a model that may be split into several. Pure."""
    match = _SPLIT_FILE.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{n + 1:05}-of-{match[2]}.gguf") for n in range(int(match[2]))]


def find_running(url: str, root: Path = Path("/proc")) -> ServerCommand | None:
    """Return the command line of the server behind a URL; None where it is on another host or cannot be read."""
    port = urlsplit(url).port
    host = urlsplit(url).hostname or ""
    if port is None or not _is_own_host(host):
        return None
    inodes = set(_list_listeners(root, port))
    for folder in root.glob("[0-9]*"):
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(link.readlink()) in inodes:
                        return read_process(folder)
    return None


def read_process(folder: Path) -> ServerCommand:
    """Return the command line of a process.

    Raises:
        OSError: it has ended, or belongs to someone else.
    """
    arguments = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
    variables = (text.partition(b"=") for text in (folder / "environ").read_bytes().split(b"\0") if text)
    environ = {os.fsdecode(name): os.fsdecode(value) for name, _, value in variables}
    cwd, executable = (folder / "cwd").readlink(), (folder / "exe").readlink()
    return ServerCommand(tuple(map(os.fsdecode, arguments)), environ, cwd, executable)


def _names_model(command: ServerCommand) -> bool:
    variables = ("MODEL", "HF_REPO", "MODEL_URL")
    return any(
        command.value(name, variable) for name, variable in zip(MODEL_ARGUMENTS, variables, strict=True)
    )


def _is_own_host(host: str) -> bool:
    return host in ("localhost", socket.gethostname()) or host.startswith("127.") or host == "::1"


def _list_listeners(root: Path, port: int) -> Iterator[str]:
    """Yield the sockets that listen on a port, as links of descriptors name them."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (root / "net" / name).read_text().splitlines()[1:]:
                fields: Sequence[str] = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                    yield f"socket:[{fields[9]}]"
