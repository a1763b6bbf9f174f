"""Without its libraries the engine says in one line what to install."""

import subprocess
import sys

import pytest

IMPORT_WITHOUT = """
import sys
sys.modules[{module!r}] = None
from kvtier.errors import MissingExtraError
try:
    import kvtier.engines.transformers
except MissingExtraError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_a_missing_library_names_the_extra(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stdout == f"module {module!r} is missing: pip install '.[transformers]' in kvtier's checkout\n"
    )
