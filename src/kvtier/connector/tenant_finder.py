"""Finds the tenant of each arriving request, and warns once where two of them could be taken for one another.

Under vLLM ``cache_salt`` alone separates tenants on the device. A request shows its own, so two tenants that send the
same one are seen here.
"""

import logging
from collections.abc import Mapping
from hashlib import blake2b

from kvtier.config import Settings
from kvtier.connector.protocols import Request
from kvtier.hints.values import RequestHints
from kvtier.tenants import OTHERS, Tenant, Tenants, make_tenants

logger = logging.getLogger(__name__)

MAX_SALTS = 4096
"""Values of ``cache_salt`` whose tenant is remembered, 100 bytes each. More find a shared one later in the traffic."""

SALT_DIGEST_BYTES = 16


class TenantFinder:
    """The tenants of an engine's requests. Used from the scheduler's thread.

    Args:
        tenants: the tenants that the engine's settings name.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._has_warned = False
        self._tenant_of_salt: dict[bytes, int] = {}

    def find(
        self, request: Request, params: Mapping[str, object] | None, hints: RequestHints
    ) -> Tenant | None:
        """Return the tenant of a request that has just arrived; None where it is not served (``Tenants.find``)."""
        tenant = self._tenants.find(params, hints)
        if tenant is not None and not self._has_warned:
            self._compare_salts(request, tenant.number)
        return tenant

    def _compare_salts(self, request: Request, tenant: int) -> None:
        """Warn when the request shares the device's prefix cache with another tenant's."""
        try:
            salt = request.cache_salt  # type: ignore[attr-defined]  # only vLLM's requests have it
        except AttributeError:
            return
        digest = blake2b(str(salt or "").encode(errors="replace"), digest_size=SALT_DIGEST_BYTES).digest()
        if len(self._tenant_of_salt) >= MAX_SALTS and digest not in self._tenant_of_salt:
            return
        if self._tenant_of_salt.setdefault(digest, tenant) != tenant:
            self._has_warned = True
            self._tenant_of_salt.clear()
            logger.warning(
                "two tenants sent %s, so they find each other's prefixes in vLLM's device cache, which kvtier does not "
                "keep apart: send another cache_salt with each tenant's requests",
                "the same cache_salt" if salt else "requests without cache_salt",
            )


def make_tenant_finder(settings: Settings) -> TenantFinder | None:
    """Return what finds the tenants that an engine's settings name; None where its requests have none.

    Raises:
        ConfigError, UnknownNameError: the setting ``tenants`` cannot work.
    """
    tenants = make_tenants(settings)
    if tenants is None:
        return None
    if tenants.others is not None and not tenants.salt:
        logger.warning(
            'tenants serves any name ("%s") and tenant_salt is not set: who may choose a name can search, in 2^56 '
            "tries, for one that shares another tenant's quota and purges: set tenant_salt, a secret; blocks that were "
            "stored before are not found then",
            OTHERS,
        )
    return TenantFinder(tenants)
