"""`profile`: heads share the model's slots by measured needs, once per model (`kvfold profile`).

Which heads read far and which only their neighbours is a property of a model far more than of a prompt (retrieval
heads, arXiv:2404.15574; HeadKV, arXiv:2410.19258). The file is JSON that binds the needs to the model's weights:

    {"format": "kvfold-profile-1", "model": …, "weights": digest, "measured": how,
     "needs": [[share of slots for each KV head] for each compressible layer]}

    H heads   S slots
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.atomic_io import replacing
from kvfold.budget.base import Budget, ModelAllocator, Scores, check_floor
from kvfold.budget.shares import share_free
from kvfold.errors import FileError, PolicyError
from kvfold.policy.registry import check_file_name, register, stated_content

if TYPE_CHECKING:
    from kvfold.core import ModelSpec


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


_LEAST_NEED = 1e-6  # shares want positive weights


@register("budget", "profile", cost="measured once for a model")
@dataclass(frozen=True)
class Profile(ModelAllocator):
    """Heads share slots by what `kvfold profile` measured that each needs; each is sure of `floor` of the mean need.

    weight = max(need, floor * mean need). Of the layers * heads * slots_per_head - protected slots that are free, a
    head gets its weight's share, at most what it has; the rest goes to the others. The scores choose which. Until the
    last layer is there its share is that among the heads seen, rounded up; heads that arrive only take away. In the end
    shares are rounded by largest remainders, so the sum is exact.

    The file holds numbers for the weights it was measured on and is refused with others. `digest` is filled in from its
    content; where a policy states it, as a saved session does, another content is refused. Fingerprints depend on the
    content, not on the file's name.
    """

    file: str
    floor: float = 0.2
    digest: str = ""

    def __post_init__(self) -> None:
        check_floor("profile", self.floor)
        check_file_name("profile", self.file)
        object.__setattr__(self, "digest", stated_content("profile", self.file, self.digest, self.measured.digest))

    @cached_property
    def measured(self) -> HeadProfile:
        """Read once, so that what the policy means does not change with the file."""
        try:
            return HeadProfile.read(Path(self.file))
        except FileError as error:
            raise PolicyError(f"profile: {error}; measure one with kvfold profile --model MODEL --out FILE") from None

    @property
    def identity(self) -> str:
        """What a fingerprint knows of it."""
        return f"profile(floor={self.floor}, content={self.measured.digest})"

    @cached_property
    def _weights(self) -> list[list[float]]:
        needs = [need for layer in self.measured.needs for need in layer]
        least = max(self.floor * sum(needs) / max(len(needs), 1), _LEAST_NEED)
        return [[max(need, least) for need in layer] for layer in self.measured.needs]

    def check(self, spec: ModelSpec) -> None:
        heads = [spec.layers[i].num_kv_heads for i in spec.compressible_layers]
        if [len(layer) for layer in self.measured.needs] != heads or self.measured.weights != spec.weights_digest:
            raise PolicyError(
                f'profile(file="{self.file}") was measured on {self.measured.model}, other weights than those of '
                f"{spec.name}; measure these with kvfold profile"
            )

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        weights = self._weights[: len(scores)]
        if [len(row) for row in weights] != [len(layer_scores.score_HS) for layer_scores in scores]:
            raise PolicyError(f'profile(file="{self.file}") has other heads than the model; measure it anew')
        low_X, high_X = (torch.cat(parts).tolist() for parts in zip(*(s.bounds for s in scores), strict=True))
        flat = [weight for row in weights for weight in row]
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        counts = share_free(total, flat, low_X, high_X, exact=layer == budget.num_layers - 1)
        shared = torch.tensor(counts, device=scores[0].score_HS.device)
        return list(shared.split([len(row) for row in weights]))
