"""Run a benchmark by name: ``python -m benchmarks manager --quick``; ``kvtier bench`` does the same."""

import argparse
import sys
from pathlib import Path

from benchmarks.harness.run import run_suites
from benchmarks.suites import SUITES, find_suite


def main() -> int:
    """Parse the command line and run the suites that it names."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure kvtier on this machine.")
    parser.add_argument(
        "names", nargs="*", help="suites to run; default: all of " + ", ".join(s.name for s in SUITES)
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--dir", type=Path, help="write files below this folder")
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.svg to this folder")
    arguments = parser.parse_args()
    try:
        suites = [find_suite(name) for name in arguments.names] or SUITES
    except KeyError as error:
        parser.error(str(error.args[0]))
    run_suites(suites, is_quick=arguments.quick, folder=arguments.dir, out_folder=arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
