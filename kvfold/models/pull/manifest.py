"""kvfold.json: what a checkpoint folder was made from, and what its files must be.

Written last, before the folder gets its name, so a folder with a fitting manifest is complete. Sizes are checked
on each use, hashes on demand.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kvfold.errors import ModelError
from kvfold.models.digest import CACHE_NAME, cached_digest, file_digest, weights_digest
from kvfold.models.pull.progress import Report, silent
from kvfold.models.pull.sources import Origin

FORMAT_REVISION = 1  # raise when conversion changes the files that come out
NAME = "kvfold.json"
_WEIGHTS = (".safetensors", ".onnx")


@dataclass(frozen=True)
class FileFacts:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    model: str
    source: str
    source_sha256: str
    source_commit: str
    weights: str
    weights_sha256: str
    files: dict[str, FileFacts]
    revision: int = FORMAT_REVISION


def write(folder: Path, model: str, origin: Origin, report: Report = silent) -> Manifest:
    """Describe the files of a finished folder."""
    weights_sha256 = weights_digest(
        folder, report, _WEIGHTS
    )  # first: it leaves the cache of weight hashes in the folder
    paths = sorted(path for path in folder.iterdir() if path.name not in (NAME, CACHE_NAME))
    files = {path.name: FileFacts(path.stat().st_size, cached_digest(path, report)) for path in paths}
    manifest = Manifest(model, origin.source, origin.sha256, origin.commit, origin.weights, weights_sha256, files)
    (folder / NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def read(folder: Path) -> Manifest | None:
    """The folder's manifest, or None where there is none that this revision understands."""
    try:
        content = json.loads((folder / NAME).read_text())
        files = {name: FileFacts(**facts) for name, facts in content.pop("files").items()}
        manifest = Manifest(files=files, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return manifest if manifest.revision == FORMAT_REVISION else None


def is_complete(folder: Path) -> bool:
    """Whether every file of the manifest is there in its size."""
    manifest = read(folder)
    return manifest is not None and not _missing(folder, manifest)


def check(folder: Path, report: Report = silent) -> Manifest:
    """Hash every file against the manifest."""
    manifest = read(folder)
    if manifest is None:
        raise ModelError(f"{folder} has no valid {NAME}; delete the folder and pull the model again")
    wrong = _missing(folder, manifest)
    sound = {name: facts for name, facts in manifest.files.items() if name not in wrong}
    wrong += [name for name, facts in sound.items() if file_digest(folder / name, report) != facts.sha256]
    if wrong:
        raise ModelError(f"{folder} is damaged ({', '.join(wrong)}); delete the folder and pull the model again")
    return manifest


def _missing(folder: Path, manifest: Manifest) -> list[str]:
    paths = {folder / name: facts for name, facts in manifest.files.items()}
    return [path.name for path, facts in paths.items() if not path.is_file() or path.stat().st_size != facts.num_bytes]
