"""The number of a tenant, which keys carry: 24 bits made from its name."""

import hashlib

TENANT_NUMBER_BYTES = 3


def tenant_number(name: str) -> int:
    """Return the number of the tenant called ``name``, from 1 on; two names may have one number. Pure."""
    digest = hashlib.blake2b(name.encode(), digest_size=TENANT_NUMBER_BYTES, person=b"kvtier tenant").digest()
    return int.from_bytes(digest, "big") or 1
