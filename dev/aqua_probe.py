"""Do integer codes lose less of what the layer below does not already tell (AQUA-KV, ICML 2025)?

    python dev/aqua_probe.py --fit 2500 [--pairs]

Keys before RoPE and values of a model, over synthetic prose for the fit and half of the handbook for the test. Ridge
regression predicts a layer's keys from the coded keys of the layer below, and its values from its own coded keys and
the coded values below; what is left is coded. `--pairs` predicts every second layer only, from one that is coded as it
is. Prints the relative error (norm) of predicted layers, coded as they are and so, and the share of variance predicted.

    H KV heads   T tokens   D head dim   C all channels of a token
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where kvfold is not installed

import kvfold
from benchmarks.codec_error import Recode, recode
from kvfold.bench.haystack import prose
from kvfold.codec.integer import Int2, Int4
from kvfold.pages.read import stored_slots

ROOT = Path(__file__).resolve().parents[1]
SINKS = 4  # left out: far from all others, and better kept exact
DAMPING = 1e-3
Layers = list[dict[str, Tensor]]  # "k" and "v", [H, T, D]


def read(model: kvfold.Model, text: str, num_tokens: int) -> Layers:
    found: Layers = []
    with kvfold.Session(model, "full", template=None) as session:
        session.extend(model.tokenizer(text)["input_ids"][:num_tokens])
        for index, layer in enumerate(model.spec.layers):
            stored = stored_slots(session.cache, index, torch.float32)
            assert layer.rope is not None
            k_HTD = layer.rope.rotate(torch.stack(list(stored.k)), -stored.position[0])
            found.append({"k": k_HTD[:, SINKS:], "v": torch.stack(list(stored.v))[:, SINKS:]})
    return found


def channels(*parts: Tensor) -> Tensor:
    """[T, C + 1]: all heads side by side, and a one."""
    flat = [part.transpose(0, 1).flatten(1) for part in parts]
    return torch.cat([*flat, torch.ones(len(flat[0]), 1)], 1).double()


def predictor(x_TC: Tensor, y_HTD: Tensor) -> Tensor:
    gram_CC = x_TC.T @ x_TC
    gram_CC += DAMPING * gram_CC.diagonal().mean() * torch.eye(len(gram_CC), dtype=gram_CC.dtype)
    return torch.linalg.solve(gram_CC, x_TC.T @ y_HTD.transpose(0, 1).flatten(1).double())


def predicted(x_TC: Tensor, weight: Tensor, like_HTD: Tensor) -> Tensor:
    return (x_TC @ weight).float().unflatten(1, (like_HTD.shape[0], -1)).transpose(0, 1)


def error(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / x.norm())


def probe(fit: Layers, test: Layers, code: Recode, *, pairs: bool) -> dict[str, list[tuple[float, float, float]]]:
    """By side and predicted layer: error as it is, error of the rest, share of variance predicted."""
    found: dict[str, list[tuple[float, float, float]]] = {"k": [], "v": []}
    below: list[dict[str, Tensor]] = []
    for index, texts in enumerate(zip(fit, test, strict=True)):
        coded: list[dict[str, Tensor]] = [{}, {}]
        for side in ("k", "v"):
            own = [layer[side] for layer in texts]
            if index == 0 or (pairs and index % 2 == 0):
                for done, x in zip(coded, own, strict=True):
                    done[side] = code(side, x)  # type: ignore[arg-type]
                continue
            if side == "k":
                seen = [channels(layer["k"]) for layer in below]
            else:
                seen = [channels(done["k"], layer["v"]) for done, layer in zip(coded, below, strict=True)]
            weight = predictor(seen[0], own[0])
            guess = [predicted(x_TC, weight, x) for x_TC, x in zip(seen, own, strict=True)]
            for done, x, y in zip(coded, own, guess, strict=True):
                done[side] = y + code(side, x - y)  # type: ignore[arg-type]
            x, spread = own[1], (own[1] - own[1].mean(1, keepdim=True)).norm()
            told = 1 - float((x - guess[1]).norm() / spread) ** 2
            found[side].append((error(x, code(side, x)), error(x, coded[1][side]), told))  # type: ignore[arg-type]
        below = coded
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--fit", type=int, default=2500, help="tokens of the fit (default: %(default)s)")
    parser.add_argument("--pairs", action="store_true", help="predict every second layer only")
    options = parser.parse_args()
    model = kvfold.load(options.model, dtype="float32", memory="1GB")
    handbook = (ROOT / "kvfold" / "data" / "handbook.txt").read_text(encoding="utf-8")
    fit = read(model, " ".join(islice(prose(Random(5)), 1000)), options.fit)
    test = read(model, handbook[len(handbook) // 2 :], 1000)
    for codec in (Int4(), Int2()):
        for side, rows in probe(fit, test, recode(codec), pairs=options.pairs).items():
            plain, rest, told = (fmean(column) for column in zip(*rows, strict=True))
            print(f"{type(codec).__name__.lower()} {side}: {plain:.4f} as it is, {rest:.4f} so; {told:.2f} predicted")


if __name__ == "__main__":
    main()
