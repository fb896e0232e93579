"""Reads kvpress_vectors.safetensors (made by dev/make_vectors.py) and rebuilds the views its selections belong to.

L layers   Q query heads   H KV heads   G query heads per KV head   T tokens   D head dim
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvfold.core import LayerSpec, Rope
from kvfold.score import QueryStats, View

PATH = Path(__file__).parent / "kvpress_vectors.safetensors"


@cache
def tensors() -> dict[str, Tensor]:
    with safe_open(PATH, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


@cache
def metadata(key: str) -> Any:
    with safe_open(PATH, framework="pt") as file:
        return json.loads(file.metadata()[key])


@dataclass(frozen=True)
class Case:
    """One model and prompt of the file."""

    name: str
    num_layers: int
    num_kv_heads: int
    num_tokens: int
    kept: int
    ties: bool

    def tensor(self, key: str) -> Tensor:
        return tensors()[f"{self.name}.{key}"]

    def kept_LHT(self, method: str) -> Tensor:
        return self.tensor(f"kept.{method}").bool()

    def view(self, layer: int, window: int = 1) -> View:
        """The layer's cache before compression, with every optional part that kvpress methods look at."""
        q_QTD, k_HTD, v_HTD = (self.tensor(key)[layer] for key in ("q_LQTD", "k_LHTD", "v_LHTD"))
        q_HGTD = q_QTD.reshape(self.num_kv_heads, -1, *q_QTD.shape[1:])
        rope = self._rope()
        position_T = torch.arange(self.num_tokens)
        position_HT = position_T.expand(self.num_kv_heads, -1)
        head_dim = k_HTD.shape[-1]
        return View(
            layer=layer,
            num_layers=self.num_layers,
            spec=LayerSpec(self.num_kv_heads, q_QTD.shape[0], head_dim, head_dim**-0.5, rope=rope),
            num_heads=self.num_kv_heads,
            k_RSD=k_HTD,
            v_RSD=v_HTD,
            position_RS=position_HT,
            valid_RS=torch.ones_like(position_HT, dtype=torch.bool),
            seen_R=torch.full((self.num_kv_heads,), self.num_tokens),
            q_RGWD=(rope.rotate(q_HGTD, position_T) * rope.attention_scale)[:, :, -window:],
            q_position_RW=position_HT[:, -window:],
            stats=moments(q_HGTD[:, :, metadata("provenance")["settings"]["sinks"] :]),
        )

    def _rope(self) -> Rope:
        return Rope(tuple(self.tensor("frequencies").tolist()), float(self.tensor("attention_scale")))


def moments(q_HGTD: Tensor) -> QueryStats:
    mean_HGD = q_HGTD.mean(dim=2)
    centred_HGTD = q_HGTD - mean_HGD.unsqueeze(2)
    return QueryStats(mean_HGD, centred_HGTD.transpose(-1, -2) @ centred_HGTD / q_HGTD.shape[2])


def cases() -> list[Case]:
    fields = ("name", "num_layers", "num_kv_heads", "num_tokens", "kept", "ties")
    return [Case(**{field: case[field] for field in fields}) for case in metadata("cases")]
