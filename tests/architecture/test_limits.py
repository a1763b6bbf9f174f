"""The project keeps the limits that CONTRIBUTING.md states."""

import os
from pathlib import Path

import pytest

from scripts import style_limits

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("folder", [name for name in style_limits.FOLDERS if (ROOT / name).is_dir()])
def test_no_file_breaks_a_limit(folder: str) -> None:
    files = style_limits.python_files([Path(os.path.relpath(ROOT / folder))])

    findings = [
        str(finding) for file in files for finding in style_limits.check(style_limits.read_source(file))
    ]

    assert findings == []
