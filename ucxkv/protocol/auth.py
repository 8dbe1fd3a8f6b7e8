"""Proof that both sides hold the shared token, without sending it. Pure.

Each side contributes a fresh 16-byte nonce and sends HMAC-SHA256 over both nonces under its own label, so that neither
a recorded proof nor the other side's own proof can be sent back.
"""

from __future__ import annotations

import hashlib
import hmac

NONCE_BYTES = 16


def proof(token: str, label: str, own_nonce: bytes, peer_nonce: bytes) -> bytes:
    """What the side called `label` ("node" or "caller") sends to prove that it holds `token`."""
    text = b"ucxkv-1/" + label.encode() + b"/" + own_nonce + peer_nonce
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def is_proof(token: str, label: str, own_nonce: bytes, peer_nonce: bytes, given: bytes) -> bool:
    """Whether `given` is the proof of the side called `label`; constant time."""
    return hmac.compare_digest(proof(token, label, own_nonce, peer_nonce), given)
