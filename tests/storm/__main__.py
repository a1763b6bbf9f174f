"""``python -m tests.storm``: storms from a seed on, until time or operations are over, or a law is broken."""

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets follows the seed of hashes, and a trace the order of sets.
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(  # noqa: S606  # the same interpreter with the same arguments
        sys.executable, [sys.executable, "-m", "tests.storm", *sys.argv[1:]]
    )

from tests.storm.command import main

sys.exit(main(sys.argv[1:]))
