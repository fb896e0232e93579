"""Which embedder a name means: `auto`, `potion`, `minilm`, `tfidf`, or the path of a folder.

`auto` is potion where it was pulled, else TF-IDF; what it is does not change while a process runs, since fingerprints
of policies hold it. Only `potion` and `minilm`, which the user names, are pulled.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from pathlib import Path

from kvfold.errors import KvfoldWarning, ModelError, PolicyError
from kvfold.models.pull import manifest
from kvfold.models.pull.pull import home_folder, model_folder, pull
from kvfold.shortening.base import Embedder
from kvfold.shortening.embedders.files import read_json
from kvfold.shortening.embedders.folder import FolderEncoder
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.embedders.minilm import MiniLm
from kvfold.shortening.embedders.static import StaticVectors

NAMES = ("auto", "potion", "minilm", "tfidf")
_PULLED = {"potion": "potion-base-8m", "minilm": "minilm-l6-int8"}
_DEFAULT = _PULLED["potion"]


def load_embedder(name: str) -> Embedder:
    """The embedder of a name; those of files are read once in a process."""
    found = _auto(home_folder()) if name == "auto" else name
    if found == "tfidf":
        return HashedTfIdf()  # of its own: it learns from the text
    if found in _PULLED:
        folder = model_folder(_DEFAULT) if name == "auto" else pull(_PULLED[found])
        return _pulled(found, folder, _stamp(folder))
    folder = Path(found).expanduser().resolve()
    if not any((folder / file).is_file() for file in ("config.json", "modules.json")):
        raise PolicyError(f'no embedder "{name}"; embedders: {", ".join(NAMES)}, or a folder of sentence-transformers')
    return _of_folder(folder, _stamp(folder))


@cache
def _auto(home: Path) -> str:
    folder = model_folder(_DEFAULT, home)
    if manifest.is_complete(folder):
        return "potion"
    if folder.is_dir():
        raise ModelError(f"{folder} is damaged; run: kvfold models pull {_DEFAULT}")
    told = "shorten compares sentences by TF-IDF of their words, because no static vectors are there"
    warnings.warn(f"{told}; run: kvfold models pull {_DEFAULT}, or write embedder=tfidf", KvfoldWarning, stacklevel=3)
    return "tfidf"


Stamp = tuple[tuple[str, int, int], ...]


def _stamp(folder: Path) -> Stamp:
    """Names, sizes and times of a folder's files, by which one that was changed is read anew."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


@lru_cache(maxsize=4)
def _pulled(name: str, folder: Path, stamp: Stamp) -> Embedder:
    manifest.check(folder)
    return StaticVectors.load(folder, name) if name == "potion" else MiniLm.load(folder, name)


@lru_cache(maxsize=4)
def _of_folder(folder: Path, stamp: Stamp) -> Embedder:
    """model2vec by its config, everything else as an encoder; the name is no part of what it is."""
    if read_json(folder, "config.json", {}).get("model_type") == "model2vec":
        return StaticVectors.load(folder, "folder")
    return FolderEncoder.load(folder, "folder")
