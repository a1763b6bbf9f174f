"""What encryption costs: puts and gets of a tier with it against the same tier without, and the cipher by itself.

Both tiers write the same rows with the same eight threads, each to packs of its own; only the ratio says something.
Each put stores new blocks, and a get loads those that were put last.
The lines of the cipher are the rates of one thread over a row of 1 MiB: what kvtier calls (``cryptography``, OpenSSL's
AES-256-GCM into given memory), the same library's call that returns new bytes, and PyCryptodome where it is installed.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, run_rounds, timed
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
    rates_of,
)
from kvtier.base import make_offload_key
from kvtier.config import OffloadingConfig
from kvtier.namespace import Namespace
from kvtier.tiering.fs import FSTier
from kvtier.tiering.kit.encryption import encrypt_namespace
from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring
from kvtier.tiering.kit.living_ring import LivingRing

NUM_ROUNDS, NUM_QUICK_ROUNDS = 12, 6
"""At least; rounded up so that each contestant begins equally often."""

NUM_THREADS = 8
NUM_BYTES = 2**26
"""Of a put."""

BLOCK_BYTES = 2**20
QUICK_BLOCK_SIZES = (BLOCK_BYTES,)
BLOCK_SIZES = (2**16, BLOCK_BYTES, 2**22)
CAPACITY_BYTES, PACK_BYTES = 8 * NUM_BYTES, 2 * NUM_BYTES
"""Room for some rounds: later ones evict. A round is in one pack or two, as in a directory of usual size."""

BAR_RATIO = 0.75
"""Ratio to the tier without encryption: direct I/O, 1 MiB."""

CIPHER_ROWS = 64
MIB = 2**20


class Turns:
    """One tier's turns.

    Args:
        tier: the tier.
        num_blocks: of a put.
    """

    def __init__(self, tier: FSTier, num_blocks: int) -> None:
        self._tier = tier
        self._num_blocks = num_blocks
        self._numbers = count()

    def run(self) -> Mapping[str, float]:
        """Store new blocks, load them, and return the rates."""
        keys = make_keys(self._num_blocks, next(self._numbers))
        return rates_of(
            NUM_BYTES,
            lambda: move_blocks(self._tier, keys, is_promotion=False),
            lambda: move_blocks(self._tier, keys, is_promotion=True),
        )


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the cipher's rates, then those of the tier by direction, block size and kind of I/O."""
    num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS)
    with options.new_folder() as folder:
        ring = folder / "ring.json"
        write_ring(ring, add_entry(make_ring(), None, 0.0))
        rounds = run_rounds(find_ciphers(ring, options.note), num_rounds)
        for operation, values in rounds.items():
            labels = {"tier": "cipher, one thread", "block": "1 MiB", "operation": operation}
            yield Measurement(labels, "MiB/s", Better.HIGHER, values)
        for block_bytes in QUICK_BLOCK_SIZES if options.is_quick else BLOCK_SIZES:
            for is_direct in (True, False):
                place = folder / f"{block_bytes}-{is_direct}"
                place.mkdir()
                yield from measure_tier(block_bytes, place, ring, options, is_direct=is_direct)


def measure_tier(
    block_bytes: int, place: Path, ring: Path, options: Options, *, is_direct: bool
) -> Iterator[Measurement]:
    """Run the tier with and without encryption in turns."""
    num_blocks = NUM_BYTES // block_bytes
    rows = make_rows(num_blocks, block_bytes)
    plain = make_config(block_bytes)
    encrypting = make_config(block_bytes, {"encryption": {"key_file": str(ring)}})
    with ExitStack() as ends:
        contestants: dict[str, Contestant] = {}
        for name, config in ((OURS, encrypting), (FLOOR, plain)):
            tier = start_tier(config, rows, place / name, is_direct=is_direct)
            ends.callback(tier.shutdown, HANG_GUARD_S)
            contestants[name] = Turns(tier, num_blocks).run
        rounds = run_rounds(contestants, options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS))
    for operation, values in rounds.items():
        has_bar = is_direct and block_bytes == BLOCK_BYTES
        yield Measurement(
            {
                "tier": f"fs, {'direct' if is_direct else 'buffered'}",
                "block": f"{block_bytes // 1024} KiB",
                "operation": operation,
            },
            "MiB/s",
            Better.HIGHER,
            values,
            Bar(FLOOR, BAR_RATIO) if has_bar else None,
        )


def start_tier(config: OffloadingConfig, rows: memoryview, place: Path, *, is_direct: bool) -> FSTier:
    """Build a tier with room for the blocks of some rounds."""
    tier = FSTier(
        config,
        rows,
        root_dir=place,
        capacity_bytes=CAPACITY_BYTES,
        pack_bytes=PACK_BYTES,
        direct_io="auto" if is_direct else False,
        num_threads=NUM_THREADS,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier


def find_ciphers(ring: Path, note: Callable[[str], None]) -> dict[str, Contestant]:
    """Return what encrypts and decrypts rows of 1 MiB: what kvtier calls, and the others that are installed."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    row = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
    out = memoryview(bytearray(BLOCK_BYTES))
    block_format = encrypt_namespace(Namespace("{}", bytes(32)), LivingRing(ring), None).format
    key = make_offload_key(bytes(32), 0)

    def ours() -> Mapping[str, float]:
        header, payload = block_format.seal(key, row, out)
        sealed = bytes(payload)
        put = rate(lambda: block_format.seal(key, row, out))
        get = rate(lambda: block_format.open(header, sealed, key, out))
        return {"put": put, "get": get}

    aead = AESGCM(bytes(32))
    sealed_by_aead = aead.encrypt(bytes(12), row, b"")

    def returning() -> Mapping[str, float]:
        put = rate(lambda: aead.encrypt(bytes(12), row, b""))
        return {"put": put, "get": rate(lambda: aead.decrypt(bytes(12), sealed_by_aead, b""))}

    contestants: dict[str, Contestant] = {OURS: ours, "new bytes": returning}
    try:
        from Crypto.Cipher import AES
    except ImportError:
        note("PyCryptodome is not installed: pip install pycryptodome")
        return contestants

    def pycryptodome() -> Mapping[str, float]:
        def put() -> None:
            cipher = AES.new(bytes(32), AES.MODE_GCM, nonce=bytes(12))
            cipher.encrypt(row, output=out)
            cipher.digest()

        def get() -> None:
            AES.new(bytes(32), AES.MODE_GCM, nonce=bytes(12)).decrypt(row, output=out)

        return {"put": rate(put), "get": rate(get)}

    return contestants | {"PyCryptodome": pycryptodome}


def rate(move: Callable[[], object]) -> float:
    """Return how fast ``move`` goes over a row of 1 MiB, MiB/s."""

    def move_all() -> None:
        for _ in range(CIPHER_ROWS):
            move()

    return CIPHER_ROWS * BLOCK_BYTES / MIB / timed(move_all)
