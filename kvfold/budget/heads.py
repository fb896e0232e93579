"""What heads need, measured once for a model, and the file it is kept in: JSON that binds it to the model's weights.

    {"format": "kvfold-profile-1", "model": …, "weights": digest, "measured": how,
     "needs": [[share of slots for each KV head] for each compressible layer]}

Which heads read far and which only their neighbours is a property of a model far more than of a prompt (retrieval
heads, arXiv:2404.15574; HeadKV, arXiv:2410.19258).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.atomic_io import replacing
from kvfold.errors import FileError

FORMAT = "kvfold-profile-1"
MAX_BYTES = 16 << 20
Needs = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HeadProfile:
    """`needs`: for each compressible layer and KV head, the share of its slots that a prompt needs, from 0 to 1."""

    model: str
    weights: str  # digest
    measured: str  # how, in words
    needs: Needs

    @property
    def text(self) -> str:
        """The file's content."""
        return json.dumps({"format": FORMAT, **vars(self)}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """sha256 of what the profile says, wherever it lies and however its file is laid out."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(self.text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> HeadProfile:
        """FileError if the file is not there, too large, or no profile."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise FileError(f"{path} cannot be read ({error.strerror})") from None
        if len(content) > MAX_BYTES:
            raise FileError(f"{path} has more than the {MAX_BYTES} bytes of a profile")
        try:
            return _profile(json.loads(content))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise FileError(f"{path} is no head profile of format {FORMAT}") from None


def _profile(found: dict[str, Any]) -> HeadProfile:
    if found["format"] != FORMAT:
        raise ValueError("another format")
    needs = tuple(tuple(float(need) for need in layer) for layer in found["needs"])
    if not all(math.isfinite(need) and 0 <= need <= 1 for layer in needs for need in layer):
        raise ValueError("a need is a share")
    return HeadProfile(str(found["model"]), str(found["weights"]), str(found["measured"]), needs)
