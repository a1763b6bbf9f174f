"""Feeds the parsers of ``tests/fuzz/parsers.py`` with bytes that atheris makes from what they have covered so far.

    python -m scripts.fuzz_parsers                       each parser for ten minutes
    python -m scripts.fuzz_parsers reply --seconds 60    one of them for one minute

A parser runs in a process of its own, because a fuzzer does not return. What it finds is written to the folder of the
findings, with the command that feeds it once more; a mended finding goes into ``tests/fuzz/corpus/PARSER``, which the
tests read. Needs ``pip install '.[fuzz]'``.

Source: atheris drives LLVM's libFuzzer, https://llvm.org/docs/LibFuzzer.html.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"

DEFAULT_SECONDS = 600
MAX_INPUT_BYTES = 8192
"""Longer inputs are read more slowly and find no more: no parser here has a state that takes more to reach."""

SLOW_SECONDS = 10
"""One input that takes as long is a finding."""

MEMORY_MB = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    """Fuzz the named parsers one after another; the status is 1 when one of them has a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="which parsers; all of them without a name")
    parser.add_argument("--seconds", type=int, default=DEFAULT_SECONDS, help="how long each is fed")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="folder for what is found"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        _fuzz(given.names[0], given.seconds, given.findings)
        return
    from tests.fuzz.parsers import PARSERS

    unknown = [name for name in given.names if name not in PARSERS]
    if unknown:
        sys.exit(f"no parser is called {unknown[0]!r}; there are {', '.join(PARSERS)}")
    given.findings.mkdir(parents=True, exist_ok=True)
    found = [name for name in given.names or PARSERS if _run(name, given.seconds, given.findings)]
    if found:
        sys.exit(f"findings in {', '.join(found)}: see {given.findings}")
    print("no finding")


def _run(name: str, seconds: int, findings: Path) -> bool:
    """Feed one parser in a process of its own; return whether something was found."""
    command = [sys.executable, "-m", "scripts.fuzz_parsers", name, "--worker", f"--seconds={seconds}"]
    command += ["--findings", str(findings)]
    log = findings / f"{name}.log"
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, check=False).returncode  # noqa: S603  # us
    lines = log.read_text(errors="replace").splitlines()
    runs = [line for line in lines if line.startswith("Done ")]
    print(f"{name}: {runs[0] if runs else f'ended with status {status}, see {log}'}", flush=True)
    return status != 0


def _fuzz(name: str, seconds: int, findings: Path) -> None:
    """Feed one parser until the time is over or it has a finding; ends the process."""
    # What is imported under this context reports which of its branches an input has taken.
    import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]  # compiled, in the extra [fuzz], without types

    with atheris.instrument_imports(include=["kvtier"]):
        from tests.fuzz.parsers import PARSERS

    target = PARSERS[name]
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        for number, seed in enumerate(target.seeds):
            (own / f"seed-{number}").write_bytes(seed)
        words = "\n".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"' for word in target.words)
        (own / "words.txt").write_text(words + "\n")
        options = [f"-max_total_time={seconds}", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={SLOW_SECONDS}"]
        options += [f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={findings.resolve()}/{name}-"]
        options += [f"-dict={own / 'words.txt'}", str(own)]
        if (CORPUS / name).is_dir():
            options.append(str(CORPUS / name))
        atheris.Setup([sys.argv[0], *options], target.feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
