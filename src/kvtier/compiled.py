"""Tells once when a module that was compiled with the package is there and cannot be loaded.

It loads nothing: the module that wants a compiled one imports it, and does the same in Python where that fails. One
that was never compiled is nothing to talk about. One that is damaged, or was compiled for another machine, costs
processor time at every block, and nobody would look for it.
"""

import importlib.util
import logging

REMEDY = (
    "where there are a C compiler and Python's headers, pip install --force-reinstall --no-cache-dir kvtier"
)
"""What makes the compiled modules anew."""

logger = logging.getLogger(__name__)


def report_import_error(module: str, error: ImportError) -> None:
    """Log why a compiled module cannot be loaded, if there is one.

    Args:
        module: its dotted name; the package it is in has been imported.
        error: what importing it raised.

    Effects: one warning for each call, so a module calls it where it imports, which happens once in a process.
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
