"""Under which identity is a prefix stored, so that nothing else's bytes can ever be taken for it?

Everything that decides bytes is a field here; change one and the root of the index is another one. Pure data.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Identity:
    """What decides the bytes of pages and rows. Strings are compared exactly; digests are lowercase hex."""

    weights_digest: str
    model_config: str  # canonical JSON of the network's shape, MTP layer included or not
    page_layout: str
    row_layout: str
    entry_dtype: str
    row_dtype: str
    weight_format: str
    page_tokens: int
    grid_tokens: int
    jax_version: str
    jaxlib_version: str
    kernels_version: str
    kernel_backend: str  # what --kernels chose, per kernel where it differs
    platform: str
    device_kind: str
    cpu_isa: str  # on CPU its model, instruction set and XLA flags; empty elsewhere
    mesh: str
    tuning_digest: str
    autotune_digest: str
    tenant_salt: str | None = None

    def salted(self, salt: str | None) -> Identity:
        """The same for one tenant."""
        return replace(self, tenant_salt=salt)

    def digest(self) -> bytes:
        """16 bytes; the root of the index. Field names are hashed too, so no value can pass for another's."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"strata-identity").digest()


def tenant_salt(cache_salt: str | None, isolated_key: str | None = None) -> str | None:
    """One salt of a request's `cache_salt` and, with --isolate-keys, its API key; None where neither is
    given.

    The key goes in as a hash, so that no salt in memory or on disk contains it.
    """
    if cache_salt is None and isolated_key is None:
        return None
    key = None if isolated_key is None else hashlib.blake2b(isolated_key.encode(), digest_size=16).hexdigest()
    return json.dumps({"cache_salt": cache_salt, "key": key}, sort_keys=True)
