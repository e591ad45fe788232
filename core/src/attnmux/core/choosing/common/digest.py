"""SHA-256 without OpenSSL, which `hashlib` loads at every start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import sha256 as sha256
else:
    try:
        from _sha2 import sha256 as sha256  # Python 3.12 and later
    except ImportError:
        try:
            from _sha256 import sha256 as sha256
        except ImportError:  # a build or an interpreter without them
            from hashlib import sha256 as sha256
