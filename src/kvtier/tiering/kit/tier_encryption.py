"""What one tier knows of encryption: its ring, the format of its namespace, and blocks whose tenant has no key.

It stands in front of the block store, so that no store is asked for a block that it could not encrypt or decrypt. The
library is imported when the first encrypted tier is built.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.base import OffloadKey
from kvtier.config import EncryptionSettings, OffloadingConfig
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierSettings
from kvtier.tiering.kit.backend import Counters
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.io_pool import Transfer, TransferOutcome
from kvtier.tiering.kit.key_ring import require_entry

if TYPE_CHECKING:
    from kvtier.tiering.kit.living_ring import LivingRing

logger = logging.getLogger(__name__)


class TierEncryption:
    """The encryption of one tier.

    Mutable are the format, which the scheduler's thread replaces at a reset, and whether the log has its line. Both are
    single references; each job keeps the format that it was submitted with.

    Args:
        settings: the engine's.
        living: the ring.
        tier: its type, for the log.
        tenant_salt: the engine's.
    """

    def __init__(
        self, settings: EncryptionSettings, living: "LivingRing", tier: str, tenant_salt: str
    ) -> None:
        self._settings = settings
        self._tenant_salt = tenant_salt
        self._living = living
        self._tier = tier
        self._format: BlockFormat | None = None
        self._counters = Counters("keyless_blocks")
        self._has_logged = False

    def open_namespace(self, identity: Namespace) -> Namespace:
        """Return the namespace in which the blocks of ``identity`` are encrypted, the tier's from now on."""
        from kvtier.tiering.kit.encryption import encrypt_namespace

        encrypted = encrypt_namespace(identity, self._living, self._settings.tenant, self._tenant_salt)
        self._format = encrypted.format
        return encrypted

    def serves(self, key: OffloadKey) -> bool:
        """Return whether the tenant of ``key`` has a key. Does not block."""
        return self._format is not None and self._format.serves(key)

    def refresh(self) -> None:
        """Notice a changed ring. Thread: any but the scheduler's; may read a small file."""
        if self._format is not None:
            self._format.refresh()

    def bind(self, run: Transfer) -> Transfer:
        """Return ``run`` for the blocks alone whose tenant has a key when they are moved."""
        assert self._format is not None, "a tier opens its namespace when it is built"
        return partial(self._run, self._format, run)

    def stats(self) -> dict[str, float]:
        """Return counts by name."""
        return self._counters.snapshot()

    def _run(
        self, block_format: BlockFormat, run: Transfer, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        block_format.refresh()
        pairs = zip(keys, slots, strict=True)
        served = [(key, slot) for key, slot in pairs if block_format.serves(key)]
        if len(served) == len(keys):
            return run(keys, slots)
        self._on_keyless(len(keys) - len(served))
        if not served:
            return TransferOutcome(())
        return run([key for key, _ in served], [slot for _, slot in served])

    def _on_keyless(self, num_blocks: int) -> None:
        self._counters.add(keyless_blocks=num_blocks)
        if not self._has_logged:
            self._has_logged = True
            logger.warning(
                "tier %s: blocks of a tenant without a key in the ring are neither stored nor loaded: "
                "`kvtier keys rotate` makes one",
                self._tier,
            )


def open_tier_encryption(
    config: OffloadingConfig,
    settings: TierSettings,
    tier: str,
    clock: Callable[[], float] = time.monotonic,
) -> TierEncryption | None:
    """Return the encryption of a tier, None where it is off.

    Raises:
        ConfigError: the key ring cannot be used, or has no entry for the engine.
        MissingExtraError: the library is not installed.
    """
    found = config.settings.encryption
    if found is None or not settings.encryption:
        return None
    from kvtier.tiering.kit.living_ring import LivingRing

    living = LivingRing(Path(found.key_file), clock)
    require_entry(living.ring, found.tenant)
    return TierEncryption(found, living, tier, config.settings.tenant_salt)
