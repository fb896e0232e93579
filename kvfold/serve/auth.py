"""API keys: authentication and the tenant of a request. A key file has `KEY TENANT` lines; `#` begins a comment.

Behind a proxy that authenticates clients itself, the proxy names the tenant, and proves by a shared secret that it is
the proxy. A tenant that is named otherwise is refused: no request falls back to another tenant than its own.

Only SHA-256 digests of keys are kept, so neither comparison time nor a memory dump reveals a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from kvfold.errors import FileError
from kvfold.serve.api.errors import ApiError

DEFAULT_TENANT = "default"
TENANT_HEADER, SECRET_HEADER = "x-kvfold-tenant", "x-kvfold-secret"
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_MAX_BYTES = 1 << 20


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | Path) -> dict[str, str]:
    """Key digest -> tenant; FileError if the file has another format."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the API keys in {path} cannot be read ({error}); name a text file") from error
    if len(text) > _MAX_BYTES:
        raise FileError(f"{path} is longer than {_MAX_BYTES} characters; name a file of API keys")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or key_digest(words[0]) in found:
            raise FileError(f"line {number} of {path} must hold a new key, a space and its tenant")
        found[key_digest(words[0])] = words[1]
    if not found:
        raise FileError(f"{path} holds no keys; write a key and a tenant on a line, or leave --keys out")
    return found


def tenant_of(headers: Mapping[str, str], tenants: Mapping[str, str] | None, proxy_digest: str | None = None) -> str:
    """Tenant of the key in `x-api-key` or `Authorization: Bearer`, or the one that a proxy names; 401 if there is none.

    `proxy_digest`: of the secret that the proxy shares with this server; None: no proxy names tenants.
    """
    if proxy_digest is not None:
        return _tenant_of_proxy(headers, proxy_digest)
    if TENANT_HEADER in headers:
        message = f"{TENANT_HEADER}: this server takes no tenants from a proxy; start it with --behind-proxy FILE"
        raise ApiError(400, message)
    if tenants is None:
        return DEFAULT_TENANT
    scheme, _, token = headers.get("authorization", "").partition(" ")
    own, bearer = headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""
    if own and bearer and own != bearer:
        raise ApiError(401, "x-api-key and Authorization hold two different API keys; send one of them")
    key = own or bearer
    found = tenants.get(key_digest(key)) if key else None
    if found is None:
        raise ApiError(401, "the API key is missing or unknown; send it as x-api-key or as a bearer token")
    return found


def _tenant_of_proxy(headers: Mapping[str, str], proxy_digest: str) -> str:
    secret, tenant = headers.get(SECRET_HEADER, ""), headers.get(TENANT_HEADER, "")
    if not hmac.compare_digest(key_digest(secret), proxy_digest):
        raise ApiError(401, f"the proxy's secret is missing or wrong; the proxy sends it as {SECRET_HEADER}")
    if not _TENANT.fullmatch(tenant):
        message = f"{TENANT_HEADER}: the proxy names the tenant of each request, by 1 to 64 of A-Z a-z 0-9 . _ @ -"
        raise ApiError(401, message)
    return tenant
