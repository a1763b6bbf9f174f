"""``python -m kvtier``: the ``kvtier`` command, for where its script is not on the search path."""

import sys

from kvtier.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
