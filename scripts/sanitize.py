"""Runs the tests of the compiled modules with the address and the undefined behaviour sanitizer.

The modules are compiled once more, with both sanitizers, into a copy of the package; the copy's tests run against
them. An error of either ends the run with its report. Needs gcc with its sanitizers, which Debian's gcc brings.

Source: https://github.com/google/sanitizers/wiki/AddressSanitizer.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("kvtier/cpu/_page_copy",)
TESTS = (
    "tests/cpu/test_page_copy.py",
    "tests/cpu/test_row_copy.py",
)
FLAGS = (
    *(
        "-std=gnu11",
        "-g",
        "-O1",
        "-fno-omit-frame-pointer",
        "-shared",
        "-fPIC",
        "-DPy_LIMITED_API=0x030B0000",
    ),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
OPTIONS = {
    # CPython and the libraries of other packages keep memory until the process ends.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    # So that each object has a memory of its own, whose end the sanitizer knows.
    "PYTHONMALLOC": "malloc",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, then run the tests; further arguments go to pytest."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    compiler = shutil.which("gcc")
    if compiler is None:
        sys.exit("gcc is not installed: apt-get install gcc")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        for name in ("tests", "scripts", "benchmarks", "pyproject.toml"):
            (copy / name).symlink_to(ROOT / name)
        for module in MODULES:
            compile_module(compiler, copy / "src" / module)
        runtimes = [_path_of(compiler, name) for name in ("libasan.so", "libubsan.so")]
        environment = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(runtimes)}
        environment["PYTHONPATH"] = f"{copy / 'src'}:{copy}"
        tests = [test for test in TESTS if (ROOT / test).exists()]
        # Captured by the system a report would end with the process that it is about.
        command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-o", "timeout=0", *tests, *given]
        status = subprocess.run(command, cwd=copy, env=environment, check=False).returncode  # noqa: S603  # ourselves
    sys.exit(status)


def compile_module(compiler: str, module: Path) -> None:
    """Compile one module where Python finds it.

    Args:
        compiler: path of gcc.
        module: its source without the ending.
    """
    include = sysconfig.get_path("include")
    target = f"{module}.abi3.so"
    command = [compiler, *FLAGS, f"-I{include}", f"{module}.c", "-o", target]
    subprocess.run(command, check=True)  # noqa: S603  # the compiler with our arguments


def _path_of(compiler: str, library: str) -> str:
    done = subprocess.run(  # noqa: S603  # the compiler with our arguments
        [compiler, f"-print-file-name={library}"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
