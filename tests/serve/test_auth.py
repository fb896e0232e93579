"""Files of API keys, and who a request is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.errors import FileError
from kvfold.serve.api.errors import ApiError
from kvfold.serve.auth import DEFAULT_TENANT, key_digest, read_keys, tenant_of


def test_a_file_names_keys_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsecret-1 red\n\nsecret-2\tblue  # later\n", encoding="utf-8")
    keys = read_keys(path)
    assert not any("secret" in digest for digest in keys)
    assert tenant_of({"x-api-key": "secret-1"}, keys) == "red"
    assert tenant_of({"authorization": "bearer secret-2"}, keys) == "blue"
    for headers in ({}, {"x-api-key": "secret"}, {"authorization": "Basic secret-1"}, {"authorization": "Bearer "}):
        with pytest.raises(ApiError, match="missing or unknown") as caught:
            tenant_of(headers, keys)
        assert caught.value.status == 401
    assert tenant_of({}, None) == DEFAULT_TENANT


def test_two_keys_that_differ_are_refused() -> None:
    keys = {key_digest("a"): "red", key_digest("b"): "blue"}
    assert tenant_of({"x-api-key": "a", "authorization": "Bearer a"}, keys) == "red"
    assert tenant_of({"x-api-key": "a", "authorization": "Basic b"}, keys) == "red"
    for other in ("b", "unknown"):
        with pytest.raises(ApiError, match="hold two different API keys; send one of them") as caught:
            tenant_of({"x-api-key": "a", "authorization": f"Bearer {other}"}, keys)
        assert caught.value.status == 401


def test_a_proxy_names_the_tenant_and_proves_itself() -> None:
    digest = key_digest("a shared secret of the two")
    proved = {"x-kvfold-secret": "a shared secret of the two"}
    assert tenant_of({**proved, "x-kvfold-tenant": "red"}, None, digest) == "red"
    for headers in ({}, {"x-kvfold-tenant": "red"}, {"x-kvfold-tenant": "red", "x-kvfold-secret": "other"}):
        with pytest.raises(ApiError, match="the proxy's secret is missing or wrong") as caught:
            tenant_of(headers, None, digest)
        assert caught.value.status == 401
    for name in ("", "a b", "x" * 65, "red\n"):
        with pytest.raises(ApiError, match="x-kvfold-tenant: the proxy names the tenant of each request") as caught:
            tenant_of({**proved, "x-kvfold-tenant": name}, None, digest)
        assert caught.value.status == 401, "nobody becomes the default tenant"


def test_a_tenant_that_nobody_vouches_for_is_refused() -> None:
    for tenants in (None, {key_digest("k"): "blue"}):
        with pytest.raises(ApiError, match="start it with --behind-proxy FILE") as caught:
            tenant_of({"x-kvfold-tenant": "red", "x-api-key": "k"}, tenants)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alone\n", "line 1 of .* must hold a new key, a space and its tenant"),
        ("a x\na y\n", "line 2 of .* must hold a new key"),
        ("# nothing\n", "holds no keys"),
        ("x" * (1 << 21), "longer than"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=message):
        read_keys(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_keys(tmp_path / "none")
