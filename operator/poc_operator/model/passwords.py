# SPDX-License-Identifier: Apache-2.0
"""What a pod proves itself with to the gateway, for one round alone."""

import hashlib
import hmac

#: The user name beside the password, in the callback address that a pod is given.
POD_USER = "pod"
_DIGITS = 32


def round_password(token: str, uid: str) -> str:
    """Return the password of the round ``uid``, which only who knows the gateway's ``token`` can make."""
    return hmac.new(token.encode(), uid.encode(), hashlib.sha256).hexdigest()[:_DIGITS]
