"""`learned`: a trained predictor of the replay's scores, without the replay (KVzap, arXiv:2601.07891).

R rows   S slots
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import check_file_name, register
from kvfold.score.base import Needs, Scorer, View, given


@register(
    "score", "learned", revision=2, paper="arXiv:2601.07891", cost="L·d·64; trained once for a model",
    published="differs: from keys and values, fitted to `kvzip` by cross-entropy, a size in place of a threshold",
)  # fmt: skip
@dataclass(frozen=True)
class Learned(Scorer):
    """Keep what a small network, trained on this model, takes for worth repeating; pair it with `global`.

    score = what the network of the slot's KV head says of its key before RoPE and its value: an estimate of the
    log-odds of `kvzip`'s score. The first `sinks` positions are +inf. `file` is what `kvfold train-scorer` wrote;
    without it, the one that comes with the package for the model's weights.

    Against KVzap: predicted from keys and values instead of hidden states, so that stored slots can be scored again at
    any time; by cross-entropy to `kvzip` instead of least squares on the logs of `kvzip_plus`; the budget decides how
    many stay, where KVzap drops below a threshold. Fingerprints depend on the content of `file`, not on its name.
    """

    file: str = ""
    sinks: int = 4
    least = (("sinks", 0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file_name("learned", self.file)

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks, predictor=self.file)

    @property
    def identity(self) -> str:
        """What a fingerprint knows of it."""
        return f"learned(sinks={self.sinks}, content={self._content})"

    @cached_property
    def _content(self) -> str:
        """The file's digest, taken once."""
        if not self.file:
            return "shipped"
        try:
            with open(self.file, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise PolicyError(
                f"learned: {self.file} cannot be read ({error.strerror}); write one with kvfold train-scorer --out FILE"
            ) from None

    def score(self, view: View) -> Tensor:
        predictor = given("learned", view.predictor, "predictor")
        log_RS = predictor.rows(view.k_RSD, view.v_RSD, view.position_RS, view.spec.rope)
        return view.masked(log_RS.masked_fill(view.position_RS < self.sinks, torch.inf))
