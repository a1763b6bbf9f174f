"""Reports a compiled module of the package that exists but cannot be loaded.

The caller imports the compiled module itself and falls back to Python. A module that was never compiled is not
reported. A damaged one, or one compiled for another machine, costs processor time at every block and would otherwise
go unnoticed.
"""

import importlib.util
import logging

REMEDY = (
    "where there are a C compiler and Python's headers, pip install --force-reinstall --no-cache-dir . in kvtier's "
    "checkout"
)
"""How to compile the modules again."""

logger = logging.getLogger(__name__)


def report_import_error(module: str, error: ImportError) -> None:
    """Log why a compiled module cannot be loaded, if it exists.

    Args:
        module: its dotted name; its package must have been imported.
        error: the error of its import.

    Effects: one warning per call, so a module calls it where it imports, once per process.
    """
    found = importlib.util.find_spec(module)
    if found is None:
        return
    logger.warning(
        "%s cannot be loaded (%s): it is damaged or was made for another machine. Python does the same with more "
        "processor time; %s",
        found.origin,
        error,
        REMEDY,
    )
