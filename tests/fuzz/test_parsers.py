"""Each parser that reads what others wrote accepts its seeds and refuses the rest as it promises.

A short walk with Hypothesis; ``python -m scripts.fuzz_parsers`` walks for minutes, led by what it has covered. The
corpus has inputs that were findings once.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.parsers import PARSERS

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_its_seeds_whole_cut_and_doubled(name: str) -> None:
    parser = PARSERS[name]
    for seed in [b"", *parser.seeds, *parser.words]:
        for end in range(0, len(seed), max(1, len(seed) // 40)):
            parser.feed(seed[:end])
        parser.feed(seed + seed)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_a_seed_with_one_wrong_byte(name: str) -> None:
    for seed in PARSERS[name].seeds:
        for at in range(0, len(seed), max(1, len(seed) // 40)):
            for wrong in (0, 0x22, 0xFF, seed[at] ^ 1):
                PARSERS[name].feed(seed[:at] + bytes([wrong]) + seed[at + 1 :])


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.binary(max_size=200))
def test_a_parser_takes_any_bytes(name: str, data: bytes) -> None:
    PARSERS[name].feed(data)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_once_stays_mended(path: Path) -> None:
    PARSERS[path.parent.name].feed(path.read_bytes())
