"""The digest by which two processes compare logits."""

from __future__ import annotations

import hashlib


def digest(logits: bytes) -> str:
    """Return the SHA-256 of logits in hexadecimal."""
    return hashlib.sha256(logits).hexdigest()
