"""``kvtier doctor``: check what kvtier needs on this machine, and what an engine's settings name.

It prints one line for each check, starts no engine and leaves nothing behind. Each check is a function that returns its
result. The command ends with status 1 when something that is needed does not work; a missing optional part (CUDA, an
extra) is not a failure.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cli.output import Check, CheckResult
from kvtier.cpu.row_copy import REMEDY
from kvtier.errors import ConfigError, MissingExtraError, install_command
from kvtier.input_files import is_dir
from kvtier.limits import AFFINITY, UsableCores, find_usable_cores
from kvtier.quantities import size_in_words

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount of shared memory, not a place for temporary files
LOCK_TABLE = Path("/proc/locks")
REGION_PATTERN = "kvtier_*"

MIN_PYTHON = (3, 11)

SMALL_SHARED_MEMORY_BYTES = 64 * 2**20
"""The default in containers. A region must fit; 64 MiB hold a few dozen blocks."""

TORCH_TIMEOUT_S = 120.0
"""Seconds that importing torch may take; on a cold disk it reads some gigabytes."""

ALIGNMENT_BYTES = 4096
"""Size of the direct write; a multiple of every common sector size."""

TORCH_REPORT = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, names]))
"""

EXTRAS = {
    "xxhash": ("fs", "checksums of tiers on disk"),
    "transformers": ("transformers", "embedded engine"),
    "matplotlib": ("plot", "pictures"),
    "prometheus_client": ("observe", "metrics for Prometheus"),
    "plotly": ("plot", "pages of simulate"),
}
"""Module -> the extra of the package that installs it, and its purpose."""

COMPILED_MODULES = {
    "compiled copies": ("cpu/_page_copy", "copies between device tensors and host memory bypass the cache"),
}
"""Optional compiled modules: subject -> path in the package without the suffix, and what it improves."""


STYLES = {CheckResult.GOOD: "green", CheckResult.NOTE: "yellow", CheckResult.BROKEN: "bold red"}


def doctor(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="A directory for the fs tier; it is probed and left unchanged."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The engine's settings as JSON: vLLM's --kv-transfer-config, or the extra_config in it. Every tier "
            "that it names is contacted, as an engine does at its start."
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            help="With --config: the namespace.json of an engine that ran; says in what it differs from what the tiers "
            "hold."
        ),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="ARGUMENTS",
            help='With --config: arguments of vllm serve, such as "MODEL --dtype bfloat16"; likewise, before a start.',
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what kvtier needs on this machine.

    Exit status 1 when something that is needed does not work.
    """
    if directory is not None and not is_dir(directory):
        raise ConfigError("--dir", str(directory), "must be an existing directory: create it first")
    if config is None and (engine or vllm):
        raise ConfigError("--config", None, "is needed with --engine and --vllm: it names the tiers")
    of_engine = [] if config is None else list(check_engine(config, engine, vllm))
    checks = [*run_checks(directory), *of_engine]
    if as_json:
        found = [{"subject": one.subject, "result": one.result.value, "found": one.found} for one in checks]
        typer.echo(json.dumps({"checks": found}, indent=1))
    else:
        print_checks(checks)
    if any(check.result is CheckResult.BROKEN for check in checks):
        raise typer.Exit(1)


def check_engine(config: Path, engine: Path | None = None, vllm: str | None = None) -> Iterator[Check]:
    """Yield the checks of an engine's settings.

    Args:
        config: the file with them.
        engine: the ``namespace.json`` of an engine that ran.
        vllm: arguments of vLLM.

    Raises:
        ConfigError: a file or the arguments cannot be used.
        MissingExtraError: the library for checksums, without which there are no tiers, is not installed.
    """
    # Imported here: without a library that tiers need the other checks must work.
    from kvtier.cli.config_checks import check_config, read_config

    yield from check_config(read_config(config), engine, vllm)


def run_checks(directory: Path | None) -> Iterator[Check]:
    """Yield every check of this machine, and of ``directory`` if given."""
    yield check_python(sys.version_info[:3])
    yield check_cores(find_usable_cores())
    yield check_formats()
    yield check_numpy()
    yield check_torch()
    yield check_shared_memory(SHARED_MEMORY)
    yield check_leftovers(SHARED_MEMORY, LOCK_TABLE)
    for module in EXTRAS:
        yield check_extra(module)
    for subject, (module, gain) in COMPILED_MODULES.items():
        yield check_compiled(subject, Path(__file__).parents[1] / module, gain)
    if directory is not None:
        yield check_space(directory)
        yield check_packs(directory)
        yield check_direct_io(directory)


def print_checks(checks: Iterable[Check]) -> None:
    """Print one line for each check."""
    table = Table(box=None, pad_edge=False)
    for heading in ("checked", "", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        result = check.result
        table.add_row(Text(check.subject), Text(result.value, STYLES[result]), Text(check.found))
    Console().print(table)


def check_python(version: tuple[int, int, int]) -> Check:
    """Compare the interpreter's version with the oldest that is supported. Pure."""
    found = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        return Check(
            "Python", CheckResult.BROKEN, f"{found}: {'.'.join(map(str, MIN_PYTHON))} or later is needed"
        )
    return Check("Python", CheckResult.GOOD, found)


def check_cores(usable: UsableCores) -> Check:
    """Report how many threads may run at the same time, and which limit applies. Pure."""
    if usable.source == AFFINITY:
        return Check("cores", CheckResult.GOOD, f"{usable.num_cores}, by affinity; no smaller CPU quota")
    return Check("cores", CheckResult.GOOD, f"{usable.num_cores}, by the CPU quota in {usable.source}")


def check_formats() -> Check:
    """Name the formats that this version writes: two versions with equal numbers read each other's blocks."""
    from kvtier.namespace import LAYOUT_VERSION
    from kvtier.recording import trace_line

    numbers = {"namespace": LAYOUT_VERSION, "trace": trace_line.VERSION}
    with contextlib.suppress(ImportError, MissingExtraError):  # without xxhash no block is read or written
        from kvtier.tiering.fs import pack_header
        from kvtier.tiering.kit import envelope

        numbers = {"block header": envelope.VERSION, "pack": pack_header.VERSION, **numbers}
    named = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return Check(
        "formats", CheckResult.GOOD, f"{named}: versions with equal numbers read each other's blocks"
    )


def check_numpy() -> Check:
    """Import numpy, the only hard dependency."""
    try:
        import numpy as np
    except ImportError as error:
        return Check("numpy", CheckResult.BROKEN, f"{error}: pip install numpy")
    return Check("numpy", CheckResult.GOOD, np.__version__)


def check_torch() -> Check:
    """Import torch in another process, because a broken build may crash the process that imports it."""
    if importlib.util.find_spec("torch") is None:
        return Check(
            "torch",
            CheckResult.NOTE,
            f"not installed, needed to move bytes: {install_command('torch')}",
        )
    command = [sys.executable, "-c", TORCH_REPORT]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter, fixed arguments
            command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("torch", CheckResult.BROKEN, f"import took more than {TORCH_TIMEOUT_S:.0f} s")
    return read_torch_report(done.returncode, done.stdout, done.stderr)


def read_torch_report(status: int, output: str, errors: str) -> Check:
    """Turn what the other process printed into a check. Pure."""
    if status:
        reason = (errors.strip() or f"exit status {status}").splitlines()[-1]
        return Check("torch", CheckResult.BROKEN, f"cannot be imported: {reason}")
    version, devices = json.loads(output.splitlines()[-1])
    if devices:
        return Check("torch", CheckResult.GOOD, f"{version}, CUDA: {', '.join(devices)}")
    return Check("torch", CheckResult.GOOD, f"{version}, no CUDA device: tensors are on the CPU")


def check_shared_memory(mount: Path) -> Check:
    """Check the size of the mount that holds the primary tier's region."""
    subject = str(mount)
    if not mount.is_dir() or not os.access(mount, os.W_OK):
        return Check(subject, CheckResult.BROKEN, "missing or not writable: mount a tmpfs there")
    usage = shutil.disk_usage(mount)
    found = f"{size_in_words(usage.free)} free of {size_in_words(usage.total)}"
    if usage.total <= SMALL_SHARED_MEMORY_BYTES:
        return Check(subject, CheckResult.NOTE, f"{found}: small, run the container with --shm-size=8g")
    return Check(subject, CheckResult.GOOD, found)


def check_leftovers(mount: Path, lock_table: Path) -> Check:
    """Find regions that no process uses: each living process holds a lock on the file it maps.

    The kernel's table of locks is read. Trying to lock instead could make a starting engine conclude that another
    engine is alive.
    """
    subject = "regions of dead processes"
    files = list(regular_files(mount.glob(REGION_PATTERN)))
    if not files:
        return Check(subject, CheckResult.GOOD, "none")
    if not lock_table.exists():
        return Check(
            subject,
            CheckResult.NOTE,
            f"{len(files)} regions; {lock_table} is missing, so their use is unknown",
        )
    locked = locked_inodes(lock_table.read_text(encoding="ascii"))
    dead = [file for file in files if (file.st_dev, file.st_ino) not in locked]
    if not dead:
        return Check(subject, CheckResult.GOOD, f"none; {len(files)} in use")
    found = f"{len(dead)}, {size_in_words(sum(file.st_size for file in dead))}"
    return Check(
        subject,
        CheckResult.NOTE,
        f"{found}: the next start of the same engine reuses them, or rm {mount}/{REGION_PATTERN}",
    )


def regular_files(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the status of each regular file; skip files that vanish meanwhile."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield status


def locked_inodes(table: str) -> set[tuple[int, int]]:
    """Return (device, inode) of every file in the kernel's table of locks. Pure."""
    found = set()
    for line in table.splitlines():
        place = next((word for word in line.split() if word.count(":") == 2), None)
        if place is not None:
            major, minor, inode = place.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def check_extra(module: str) -> Check:
    """Check whether an optional library is installed, without importing it."""
    extra, purpose = EXTRAS[module]
    if importlib.util.find_spec(module) is None:
        return Check(module, CheckResult.NOTE, f"not installed, for {purpose}: {install_command(extra)}")
    return Check(module, CheckResult.GOOD, importlib.metadata.version(module))


def check_compiled(subject: str, module: Path, gain: str) -> Check:
    """Check whether a compiled module, given by its path without suffix, exists and can be loaded."""
    fault = find_fault(module)
    if fault is None:
        return Check(subject, CheckResult.GOOD, gain)
    return Check(
        subject, CheckResult.NOTE, f"Python does the same with more processor time, because {fault}: {REMEDY}"
    )


def find_fault(module: Path) -> str | None:
    """Return why a compiled module cannot be loaded, None when it can."""
    paths = [module.with_name(module.name + suffix) for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        return "it was not compiled"
    try:
        importlib.util.module_from_spec(spec_of_extension(module.name, found))
    except ImportError as error:
        return str(error)
    return None


def spec_of_extension(name: str, path: Path) -> ModuleSpec:
    """Return the location of a compiled module, to load it without the packages around it. Pure."""
    return ModuleSpec(name, ExtensionFileLoader(name, str(path)), origin=str(path))


def check_space(directory: Path) -> Check:
    """Check the free space of a directory, and whether files can be created in it."""
    subject = str(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        return Check(subject, CheckResult.BROKEN, "not writable: choose another or change its owner")
    usage = shutil.disk_usage(directory)
    return Check(
        subject,
        CheckResult.GOOD,
        f"writable, {size_in_words(usage.free)} free of {size_in_words(usage.total)}",
    )


def check_packs(directory: Path) -> Check:
    """Find out whether the fs tier can keep packs here: locks must exclude, and room can be reserved."""
    subject = f"packs in {directory}"
    try:
        from kvtier.tiering.fs.file_systems import require_unshared, try_file_system
        from kvtier.tiering.fs.system_calls import PRIVATE_MODE, REAL_CALLS
    except (ImportError, MissingExtraError) as error:
        return Check(subject, CheckResult.NOTE, f"not tried: {error}")
    try:
        require_unshared(directory, REAL_CALLS)
        try_file_system(directory / f".kvtier-doctor-{os.getpid()}", PRIVATE_MODE, REAL_CALLS)
    except ConfigError as error:
        return Check(subject, CheckResult.BROKEN, error.remedy)
    except OSError as error:
        return Check(subject, CheckResult.BROKEN, f"no file can be made: {error.strerror}")
    return Check(subject, CheckResult.GOOD, "locks exclude, and room can be reserved")


def check_direct_io(directory: Path) -> Check:
    """Try one aligned write past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".kvtier-doctor-") as file:
            try_direct_write(file.name)
    except OSError as error:
        return Check("O_DIRECT", CheckResult.NOTE, f"refused ({error.strerror}): buffered I/O is used")
    return Check("O_DIRECT", CheckResult.GOOD, "blocks can bypass the page cache")


def try_direct_write(path: str) -> None:
    """Write one aligned page to ``path`` with direct I/O.

    Raises:
        OSError: the file system refuses it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
            os.pwrite(descriptor, page, 0)
    finally:
        os.close(descriptor)
