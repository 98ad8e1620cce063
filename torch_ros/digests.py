"""The digest by which bytes are known to be complete, and the same."""

from hashlib import blake2b

DIGEST_BYTES = 16


def digest_of(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
