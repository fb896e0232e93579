"""The lifts of a model's layers for the codec `aqua`: what each second layer's keys and values follow from, by ridge
regression on those of the layer below.

    H KV heads   T tokens   D head dim   C channels of a token, H D
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Side
from kvfold.codec.lifts import Lifts, SideLift, lifted_layers
from kvfold.errors import InputError, ModelError
from kvfold.models.loader import Model
from kvfold.models.progress import Report, silent
from kvfold.pages.read import stored_slots
from kvfold.session import Session
from kvfold.train.traces import MIN_LEN

SINKS = 4  # tokens left out: far from all others, and kept exact
DAMPING = 1e-3  # of the mean variance, as in the paper


@dataclass
class _Moments:
    """Sums over tokens of a layer's channels y and those below, x, with a one behind; float64."""

    xx: Tensor
    xy: Tensor
    yy: Tensor  # by channel
    y: Tensor
    count: int

    @classmethod
    def of(cls, below_TC: Tensor, y_TC: Tensor) -> _Moments:
        x = torch.cat((below_TC, torch.ones_like(below_TC[:, :1])), 1).double()
        y = y_TC.double()
        return cls(x.mT @ x, x.mT @ y, y.square().sum(0), y.sum(0), len(y))

    def add(self, other: _Moments) -> None:
        for name, sum_of in vars(other).items():
            setattr(self, name, getattr(self, name) + sum_of)

    def solved(self) -> Tensor:
        """[C + 1, C]: weights, and the bias in the last row, which is not damped."""
        damping = self.xx.diagonal()[:-1].mean() * DAMPING * torch.ones_like(self.xx.diagonal())
        damping[-1] = 0
        found: Tensor = torch.linalg.solve(self.xx + damping.diag(), self.xy)
        return found

    def told(self) -> float:
        """Share of the variance that is told."""
        solved = self.solved()
        left = self.yy.sum() - 2 * (solved * self.xy).sum() + (solved * (self.xx @ solved)).sum()
        return float(1 - left / (self.yy - self.y.square() / self.count).sum())

    def lift(self) -> SideLift:
        solved = self.solved().float().cpu()
        return SideLift(solved[:-1].contiguous(), solved[-1].contiguous())


@dataclass(frozen=True)
class Measured:
    lifts: Lifts
    told: dict[int, dict[Side, float]]  # share of the variance of a layer's side, over the texts


def measure_lifts(model: Model, texts: Sequence[Sequence[int]], report: Report = silent) -> Measured:
    """Read texts of token ids, each alone."""
    if not texts or min(map(len, texts)) < MIN_LEN:
        raise InputError(f"lifts are measured on one text or more, each of at least {MIN_LEN} tokens")
    layers = lifted_layers(model.spec)
    if not layers:
        raise ModelError(f"{model.name} has no two adjacent layers alike that keep everything; aqua cannot serve it")
    total: dict[tuple[int, Side], _Moments] = {}
    for done, ids in enumerate(texts, 1):
        with Session(model, "full", template=None) as session:
            session.extend(ids)
            for layer in layers:
                below, own = (_channels(session, i) for i in (layer - 1, layer))
                for side in SIDES:
                    moments = _Moments.of(below[side], own[side])
                    total.setdefault((layer, side), moments)
                    if total[layer, side] is not moments:
                        total[layer, side].add(moments)
        report("read texts", done, len(texts))
    how = f"{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} tokens"
    found = {i: {side: total[i, side].lift() for side in SIDES} for i in layers}
    told = {i: {side: total[i, side].told() for side in SIDES} for i in layers}
    return Measured(Lifts(model.name, model.weights_digest, how, found), told)


def _channels(session: Session, layer: int) -> dict[Side, Tensor]:
    """[T, C] of what is stored, keys at position 0."""
    stored, rope = stored_slots(session.cache, layer, torch.float32), session.model.spec.layers[layer].rope
    k_HTD, v_HTD = torch.stack(stored.k), torch.stack(stored.v)
    if rope is not None:
        k_HTD = rope.rotate(k_HTD, -stored.position[0])
    return {"k": k_HTD[:, SINKS:].transpose(0, 1).flatten(1), "v": v_HTD[:, SINKS:].transpose(0, 1).flatten(1)}
