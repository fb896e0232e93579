"""Calibration files of codecs: what is measured of a model once (`kvfold calibrate`).

metadata   "kvfold": JSON with the format, the model, the digest of its weights, and how it was measured
tensors    fp32, as the kind says
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvfold.atomic_io import read_tensors, replacing
from kvfold.errors import FileError


@dataclass(frozen=True, eq=False)
class Calibration(ABC):
    """Of one model."""

    KIND: ClassVar[str]  # as errors call it
    FORMAT: ClassVar[str]
    MAX_BYTES: ClassVar[int]

    model: str
    weights: str  # digest
    measured: str  # how, in words

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, Tensor]:
        """Tensors of the file by their names."""

    @property
    def said(self) -> dict[str, Any]:
        """What else stands in its header."""
        return {}

    @classmethod
    @abstractmethod
    def made(cls, facts: tuple[str, str, str], header: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Self:
        """Of model, weights and how it was measured, and the rest of a file; LookupError, ValueError or TypeError
        where that is of another kind."""

    @cached_property
    def digest(self) -> str:
        """sha256 of what the file says, wherever it lies."""
        found = hashlib.sha256(self._header.encode())
        for name, tensor in sorted(self._tensors.items()):
            found.update(name.encode())
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    @property
    def _header(self) -> str:
        facts = {"format": self.FORMAT, "model": self.model, "weights": self.weights, "measured": self.measured}
        return json.dumps({**facts, **self.said}, sort_keys=True)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: part.float().cpu().contiguous() for name, part in self.parts.items()}

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            save_file(self._tensors, temporary, metadata={"kvfold": self._header})

    @classmethod
    def read(cls, path: Path) -> Self:
        """FileError if the file is not there, too large, or of another kind."""
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise FileError(f"{path} cannot be read ({error.strerror})") from None
        if num_bytes > cls.MAX_BYTES:
            raise FileError(f"{path} has {num_bytes} bytes; {cls.KIND} have at most {cls.MAX_BYTES}")
        try:
            header, tensors = read_tensors(path, cls.FORMAT)
            return cls.made((str(header["model"]), str(header["weights"]), str(header["measured"])), header, tensors)
        except (SafetensorError, LookupError, ValueError, TypeError, OSError) as error:
            raise FileError(f"{path} is truncated or holds no {cls.KIND}") from error
