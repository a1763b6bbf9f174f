"""Put what an engine of vLLM logs at its start into docs/guide/vllm.md, as examples/vllm/server.sh prints it.

    python -m scripts.start_log             in vLLM's environment; exit status 1 when it has changed the page

What differs between runs and machines is shown as one reader's: the model, the tier's directory, the instance id, and
the release of vLLM.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guide/vllm.md"
EXAMPLE = ROOT / "examples/vllm/server.sh"

INSTANCE = "61937e58-fda4-458e-9d36-7cacff1c1447"
SHOWN = (
    (r"(?<=the KV cache of )\S+", "MODEL"),
    (r"(?<=for vLLM )[\d.]+", "0.32"),
    (r"(?<=fs: )\S+(?=, at most)", "/var/cache/kvtier"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", INSTANCE),
)
"""What is replaced in the lines, and by what."""

_LINE = re.compile(r"^kvtier(?: [0-9.]+ keeps|:) .*\n", re.MULTILINE)
_BLOCK = re.compile(r"(?<=```\n)kvtier [0-9.]+ keeps[^`]*(?=```)")


def main() -> int:
    """Run the example and rewrite the page; return 1 when that changed it."""
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(["bash", EXAMPLE], env=environment, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603, S607
    before = PAGE.read_text(encoding="utf-8")
    after = with_start_log(before, done.stdout)
    PAGE.write_text(after, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'as the engine logs' if after == before else 'rewritten'}")
    return int(after != before)


def with_start_log(page: str, printed: str) -> str:
    """Return the page with the lines of a start in what was printed. Pure."""
    lines = "".join(_LINE.findall(printed))
    for pattern, shown in SHOWN:
        lines = re.sub(pattern, shown, lines)
    assert lines, "no line of a start was printed"
    page, num_blocks = _BLOCK.subn(lambda _: lines, page)
    assert num_blocks == 1, "the page has no such block, or several"
    return page


if __name__ == "__main__":
    sys.exit(main())
