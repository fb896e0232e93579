"""Download a model or an embedder by name: pulled once, verified, kept as a plain folder under KVFOLD_HOME.

    <home>/models/<name>/            a finished transformers checkpoint, or the files of an embedder, with kvfold.json
    <home>/models/.<name>.partial/   an unfinished pull: verified parts are kept after a kill
    <home>/models/.<name>.lock       released by the kernel when its process dies, so it is never stale

A pull works in a hidden folder beside its target and renames at the end, so a checkpoint is either complete or absent.

The catalogue (kvfold/data/models.json) names models and the sources of each. Packages come first: they are checked by
sha256, so a name means the same weights on every machine, and they are the smaller download. The hub, second, has the
original weights; results differ, and a folder records what it was made from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from kvfold.errors import ModelError
from kvfold.models.pull import manifest
from kvfold.models.pull.progress import Report, reporting, silent
from kvfold.models.pull.sources import HubSource, Origin, PackageFiles, PackageSource, Part, Source

HOME_HELP = (
    "Models are kept under KVFOLD_HOME (default: ~/.cache/kvfold, or kvfold under XDG_CACHE_HOME; macOS: "
    "~/Library/Caches/kvfold; Windows: kvfold under LOCALAPPDATA)."
)
DEFAULT_MODEL = "smollm2-135m"
Kind = Literal["model", "embedder"]
DTYPE_NAMES = ("auto", "bfloat16", "float16", "float32")  # here, where no torch is needed to know them


@dataclass(frozen=True)
class Entry:
    """One model: facts for people, the dtype it is saved in, and its sources in order of preference."""

    name: str
    family: str
    description: str
    licence: str
    num_parameters: int
    context_len: int | None  # None: any length
    dtype: str
    sources: tuple[Source, ...]
    kind: Kind = "model"


def _entry(
    *, file_format: Any, weights: str, parts: list[dict[str, Any]], hub: str = "", sha256: str = "", **facts: Any
) -> Entry:
    found = tuple(Part(**part) for part in parts)
    if file_format == "files":
        return Entry(**facts, sources=(PackageFiles(found, weights),))
    return Entry(**facts, sources=(PackageSource(found, file_format, sha256, weights), HubSource(hub)))


_ENTRIES = json.loads((files("kvfold") / "data" / "models.json").read_text(encoding="utf-8"))
CATALOGUE: dict[str, Entry] = {facts["name"]: _entry(**facts) for facts in _ENTRIES}


def names_of(kind: Kind) -> tuple[str, ...]:
    """Names of the catalogue's models, or of its embedders."""
    return tuple(name for name, entry in CATALOGUE.items() if entry.kind == kind)


def find(name: str) -> Entry:
    """The entry of a catalogue name."""
    if name not in CATALOGUE:
        raise ModelError(f'no model "{name}"; models: {", ".join(CATALOGUE)}')
    return CATALOGUE[name]


def home_folder() -> Path:
    """KVFOLD_HOME, or kvfold in the platform's cache folder."""
    if chosen := os.environ.get("KVFOLD_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvfold"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvfold"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"


def model_folder(name: str, home: Path | None = None) -> Path:
    return (home or home_folder()).absolute() / "models" / name


def partial_folder(name: str, home: Path | None = None) -> Path:
    return model_folder(f".{name}.partial", home)


@contextmanager
def locked(name: str, home: Path | None, report: Report) -> Iterator[None]:
    """Hold the model's lock; wait, and report that, while another process has it."""
    path = model_folder(f".{name}.lock", home)
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        label = f"wait for another process that pulls {name}"
        report(label, 0, None)
        lock.acquire()
        report(label, 1, 1)
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent} ({error.strerror}); set KVFOLD_HOME to a folder you own"
        ) from error
    try:
        yield
    finally:
        lock.release()


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


@dataclass(frozen=True)
class ModelRow:
    """What `kvfold models` prints of one model; `disk_bytes` and `source` are None until it is pulled."""

    name: str
    kind: Kind
    description: str
    licence: str
    num_parameters: int
    context_len: int | None
    disk_bytes: int | None
    source: str | None
    partial_bytes: int = 0  # of an interrupted pull


def pull(name: str, *, home: Path | None = None, progress: bool | Report = True) -> Path:
    """The folder of a catalogue model, fetched and converted if it is not there yet."""
    entry, folder = find(name), model_folder(name, home)
    if manifest.is_complete(folder):
        return folder
    with reporting(progress) as report, locked(name, home, report):
        if not manifest.is_complete(folder):  # another process may have made it while we waited
            _make(entry, folder, partial_folder(name, home), report)
    return folder


def verify(name: str, *, home: Path | None = None, progress: bool | Report = True) -> manifest.Manifest:
    """Hash all files of a pulled model; raise ModelError if one is missing or altered."""
    folder = model_folder(find(name).name, home)
    if not folder.is_dir():
        raise ModelError(f'model "{name}" is not in {folder.parent.parent}; run: kvfold models pull {name}')
    with reporting(progress) as report:
        return manifest.check(folder, report)


def resolve(name_or_path: str | Path, *, home: Path | None = None, progress: bool | Report = True) -> Path | str:
    """What transformers can load: the folder of a catalogue name (pulled if need be), a folder, or a hub id."""
    if str(name_or_path) in names_of("embedder"):
        models = ", ".join(names_of("model"))
        raise ModelError(f"{name_or_path} is an embedder, which shorten(…, embedder=…) takes; models: {models}")
    if str(name_or_path) in CATALOGUE:
        return pull(str(name_or_path), home=home, progress=progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f'"{path}" has no config.json; name the folder of a transformers checkpoint')
        return path
    if isinstance(name_or_path, str) and _HUB_ID.match(name_or_path):
        return name_or_path
    near = get_close_matches(str(name_or_path).lower(), names_of("model"), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(names_of("model"))
    raise ModelError(
        f'no model "{name_or_path}"; {hint}give one of {names}, a checkpoint folder, or a hub id such as org/name'
    )


def remove(name: str, *, home: Path | None = None) -> int:
    """Delete a pulled model and what an interrupted pull left of it; returns the bytes that are free again."""
    find(name)
    folders = [path for path in (model_folder(name, home), partial_folder(name, home)) if path.is_dir()]
    if not folders:
        raise ModelError(f"{name} is not on this machine; kvfold models lists what is")
    with locked(name, home, silent):
        num_bytes = sum(map(_folder_bytes, folders))
        for folder in folders:
            shutil.rmtree(folder)
    return num_bytes


def list_models(*, home: Path | None = None) -> list[ModelRow]:
    """One row per catalogue entry."""
    return [
        _row(entry, model_folder(entry.name, home), _folder_bytes(partial_folder(entry.name, home)))
        for entry in CATALOGUE.values()
    ]


def _row(entry: Entry, folder: Path, partial_bytes: int) -> ModelRow:
    facts = (entry.name, entry.kind, entry.description, entry.licence, entry.num_parameters, entry.context_len)
    pulled = manifest.read(folder) if manifest.is_complete(folder) else None
    if pulled is None:
        return ModelRow(*facts, disk_bytes=None, source=None, partial_bytes=partial_bytes)
    disk_bytes = sum(file.num_bytes for file in pulled.files.values())
    source = f"{pulled.source} ({pulled.weights})"
    return ModelRow(*facts, disk_bytes=disk_bytes, source=source, partial_bytes=partial_bytes)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _make(entry: Entry, folder: Path, scratch: Path, report: Report) -> None:
    checkpoint, home = scratch / "checkpoint", folder.parent.parent
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        origin = _build_from_first(entry, scratch, checkpoint, home, report)
        manifest.write(checkpoint, entry.name, origin, report)
        shutil.rmtree(folder, ignore_errors=True)  # incomplete, or we would not be here
        os.replace(checkpoint, folder)
    except OSError as error:
        reason = f'model "{entry.name}" could not be written to {home} ({error})'
        raise ModelError(f"{reason}; make room there or set KVFOLD_HOME to another folder") from error
    shutil.rmtree(scratch, ignore_errors=True)


def _build_from_first(entry: Entry, scratch: Path, checkpoint: Path, home: Path, report: Report) -> Origin:
    """Build from the first source that is available."""
    reasons = []
    for source in entry.sources:
        for leftover in filter(Path.is_dir, scratch.iterdir()):  # half-done; finished parts are files and stay
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            return source.build(scratch, checkpoint, entry.dtype, report)
        except ModelError as error:
            reasons.append(f"{source.label}: {error}")
            report(f"no {entry.name} from {reasons[-1]}", 1, 1)
    places = " or ".join(dict.fromkeys(source.place for source in entry.sources))
    raise ModelError(
        f'{entry.kind} "{entry.name}" is not in {home} and could not be fetched ({"; ".join(reasons)}); '
        f"connect to {places} and run: kvfold models pull {entry.name}"
    )
