"""Low-rank bases of keys and values for the codec `palu`: principal axes per group of heads, and the worth of each.

Texts are run with gradients. The axes of a group of heads are the eigenvectors of the covariance of its keys before
RoPE, and of its values. Dropping an axis changes a slot by its latent h and the loss, to first order, by g h with g the
gradient along it; so the worth of an axis is its variance E[h^2] times the mean of E[g^2] over the channels of its
group (Fisher information). The paper allocates ranks to layers and sides by the Fisher information of their weights
alone; with SmolLM2-135M that loses twice as much (dev/LOG.md).

    G groups   X channels of a group   T tokens   H KV heads   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Side
from kvfold.codec.basis import Bases, SideBasis
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.pass_cache import KVGradients, kv_gradients
from kvfold.models.pull.progress import Report, silent
from kvfold.plurals import counted
from kvfold.train.traces import MIN_LEN


@dataclass
class _Moments:
    """Sums over tokens, float64."""

    count: int
    x_GX: Tensor
    xx_GXX: Tensor
    gg_G: Tensor  # squares of gradients, mean over channels

    @classmethod
    def of(cls, x_GTX: Tensor, g_GTX: Tensor) -> _Moments:
        x, g = x_GTX.double(), g_GTX.double()
        return cls(x.shape[1], x.sum(1), x.mT @ x, g.square().mean(2).sum(1))

    def add(self, other: _Moments) -> None:
        self.count += other.count
        self.x_GX += other.x_GX
        self.xx_GXX += other.xx_GXX
        self.gg_G += other.gg_G

    def basis(self) -> SideBasis:
        mean_GX = self.x_GX / self.count
        covariance_GXX = self.xx_GXX / self.count - mean_GX.unsqueeze(-1) * mean_GX.unsqueeze(-2)
        variance_GX, axes_GXX = (part.flip(-1) for part in torch.linalg.eigh(covariance_GXX))
        worth_GX = variance_GX.clamp(min=0) * (self.gg_G / self.count).unsqueeze(-1)
        return SideBasis(*(part.float().cpu() for part in (mean_GX, axes_GXX, worth_GX)))


def measure_bases(model: Model, texts: Sequence[Sequence[int]], num_heads: int = 4, report: Report = silent) -> Bases:
    """Bases from texts of token ids, each run alone; groups of at most `num_heads` heads that divide the model's."""
    if not texts or min(map(len, texts)) < MIN_LEN:
        raise InputError(f"bases are measured on one text or more, each of at least {MIN_LEN} tokens")
    size = _divisor(model, num_heads)
    total: dict[tuple[int, Side], _Moments] = {}
    for done, ids in enumerate(texts, 1):
        gradients = kv_gradients(model.hf, ids)
        for layer in model.spec.compressible_layers:
            for side, moments in _moments(model, layer, gradients[layer], size).items():
                total.setdefault((layer, side), moments)
                if total[layer, side] is not moments:
                    total[layer, side].add(moments)
        report("read texts", done, len(texts))
    layers = {i: {side: total[i, side].basis() for side in SIDES} for i in model.spec.compressible_layers}
    how = f"{counted(len(texts), 'text')} of {min(map(len, texts))} to {max(map(len, texts))} tokens"
    return Bases(model.name, model.weights_digest, how, size, layers)


def _moments(model: Model, layer: int, found: KVGradients, size: int) -> dict[Side, _Moments]:
    rope = model.spec.layers[layer].rope
    k, by_k = found.k_HTD.float(), found.by_k_HTD.float()
    if rope is not None:
        back_T = -torch.arange(k.shape[1], device=k.device)
        k, by_k = rope.rotate(k, back_T), rope.rotate(by_k, back_T)
    pairs: dict[Side, tuple[Tensor, Tensor]] = {"k": (k, by_k), "v": (found.v_HTD, found.by_v_HTD)}
    return {side: _Moments.of(_grouped(x, size), _grouped(g, size)) for side, (x, g) in pairs.items()}


def _grouped(x_HTD: Tensor, size: int) -> Tensor:
    """[G, T, X]: the channels of a group side by side, head after head."""
    num_heads, num_tokens, _ = x_HTD.shape
    return x_HTD.view(num_heads // size, size, num_tokens, -1).transpose(1, 2).flatten(2)


def _divisor(model: Model, most: int) -> int:
    """The largest number of heads up to `most` that divides those of every layer."""
    counts = {model.spec.layers[i].num_kv_heads for i in model.spec.compressible_layers}
    return next(size for size in range(most, 0, -1) if all(count % size == 0 for count in counts))
