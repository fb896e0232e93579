"""The term `palu`: which axes it keeps, what it refuses, and the file it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.codec import Int4, Native, Palu
from kvfold.codec.basis import MAX_BYTES, Bases, SideBasis
from kvfold.core import ModelSpec, Rope
from kvfold.errors import FileError, PolicyError
from kvfold.policy import Policy
from tests.codec.bases import random_bases
from tests.pages.tiny import tiny_spec

SPEC = tiny_spec(num_layers=2, num_heads=2, head_dim=16)


def worth(k: list[float], v: list[float]) -> Bases:
    """One layer, two heads of 16 channels together; what each quarter of the axes is worth."""
    found = random_bases(tiny_spec(num_layers=1), 2)
    sides = {
        side: SideBasis(basis.mean_GX, basis.axes_GXX, torch.tensor(quarters).repeat_interleave(8).unsqueeze(0))
        for (side, basis), quarters in zip(found.layers[0].items(), (k, v), strict=True)
    }
    return replace(found, layers={0: sides})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bases.safetensors"
    random_bases(SPEC, 2).write(path)
    return path


@pytest.mark.parametrize(
    ("rank", "kept"),
    [(1.0, (16, 16)), (0.9, (12, 16)), (0.7, (8, 16)), (0.6, (8, 12)), (0.5, (4, 12)), (0.01, (4, 4))],
)
def test_ranks_go_where_axes_are_worth_most(tmp_path: Path, rank: float, kept: tuple[int, int]) -> None:
    """Eight steps of 4 channels a head: both sides have their first, then v 8, v 7, k 6, v 5, k 2, k 1 follow."""
    path = tmp_path / "worth.safetensors"
    worth([9.0, 6.0, 2.0, 1.0], [9.0, 8.0, 7.0, 5.0]).write(path)
    widths = Palu(str(path), rank=rank).widths
    assert (widths[0, "k"], widths[0, "v"]) == kept


def test_a_layer_begins_with_the_axes_that_are_worth_most(file: Path) -> None:
    """The span of the kept axes is that of the file's first ones, whatever mixes them."""
    codec = Palu(str(file), rank=0.75)
    basis = codec.basis("k", SPEC, 1, torch.device("cpu"))
    assert basis.rope == SPEC.layers[1].rope and codec.basis("v", SPEC, 1, torch.device("cpu")).rope is None
    kept = basis.axes_GXr[0]
    first = codec.measured.layers[1]["k"].axes_GXX[0, :, : kept.shape[1]]
    torch.testing.assert_close(kept @ kept.mT, first @ first.mT, atol=1e-5, rtol=0)
    assert not torch.allclose(kept, first, atol=0.1)


def test_a_file_says_what_was_written(file: Path) -> None:
    wrote, read = random_bases(SPEC, 2), Bases.read(file)
    assert (read.digest, read.model, read.num_heads) == (wrote.digest, "tiny", 2)
    assert read.digest != random_bases(SPEC, 2, seed=1).digest
    assert read.layers[1]["v"].axes_GXX.equal(wrote.layers[1]["v"].axes_GXX)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_fingerprints_know_the_content_and_not_the_name(file: Path, tmp_path: Path) -> None:
    other, twin = tmp_path / "other.safetensors", tmp_path / "twin.safetensors"
    random_bases(SPEC, 2, seed=1).write(other)
    twin.write_bytes(file.read_bytes())
    for form in ('palu("{}")', 'palu("{}", int4, layers=1:)', 'codec(k=int4, v=palu("{}", rank=0.5))'):
        mine, same, differs = (Policy.parse(form.format(path)).fingerprint for path in (file, twin, other))
        assert mine == same != differs
    ranks = {Policy.parse(f'palu("{file}", {more})').fingerprint for more in ("rank=0.5", "rank=0.6", "int8, rank=0.6")}
    assert len(ranks) == 3


def test_what_is_written_can_be_read_again(file: Path) -> None:
    policy = Policy.parse(f'palu("{file}", int4, rank=0.5)')
    assert policy.codec.k == Palu(str(file), Int4(), 0.5)
    assert Policy.parse(policy.short) == Policy.parse(str(policy)) == policy
    random_bases(SPEC, 2, seed=1).write(file)
    with pytest.raises(PolicyError, match=r"its content is sha_\w+, not sha_\w+; measure it anew"):
        Policy.parse(str(policy))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("rank=0", "rank is a share above 0 and at most 1, not 0"),
        ("rank=1.5", "rank is a share above 0 and at most 1, not 1.5"),
        ("kivi4", "latents cannot be coded by kivi4; use native, bf16, fp8, int8, int4 or int2"),
        ("minicache", "latents cannot be coded by minicache"),
    ],
)
def test_arguments_that_cannot_work_are_refused(file: Path, arguments: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy.parse(f'palu("{file}", {arguments})')


def test_latents_of_latents_are_refused(file: Path) -> None:
    with pytest.raises(PolicyError, match="latents cannot be coded by palu"):
        Palu(str(file), Palu(str(file)))
    assert Palu(str(file)).latents == Native()


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("knorm + 2x", "stores 2 heads together, and each head may evict other slots"),
        ("prefill(knorm + 2x)", "kvfold calibrate --heads 1"),
        ("quest", "reader quest ranks pages by keys as they are stored"),
    ],
)
def test_policies_that_cannot_serve_it_are_refused(file: Path, policy: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy.parse(f'{policy} + palu("{file}")')


def test_models_that_it_does_not_fit_are_refused(file: Path) -> None:
    codec = Palu(str(file))
    codec.check(SPEC)
    others = [
        tiny_spec(num_layers=3),
        tiny_spec(num_heads=4),
        tiny_spec(head_dim=8),
        tiny_spec(sliding={0: 8}),
        replace(SPEC, digest=lambda: "of others"),
    ]
    for other in others:
        with pytest.raises(PolicyError, match="was measured on tiny, other weights than those of tiny"):
            codec.check(other)
    with pytest.raises(PolicyError, match="RoPE frequencies of tiny depend on the length"):
        codec.check(_dynamic())


def _dynamic() -> ModelSpec:
    return tiny_spec(rotated=Rope(tuple(0.1 for _ in range(8)), depends_on_length=True))


def broken(path: Path, kind: str) -> None:
    tensors = load_file(path)
    header = {"format": "kvfold-bases-1", "model": "", "weights": "", "measured": "", "heads": 2}
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-10])
        return
    if kind == "format":
        header["format"] = "kvfold-bases-2"
    if kind == "skew":
        tensors["0.k.axes"] *= 2
    if kind == "nan":
        tensors["1.v.mean"][0, 0] = torch.nan
    if kind == "narrow":
        tensors["0.v.axes"] = tensors["0.v.axes"][..., :5].contiguous()
    if kind == "missing":
        del tensors["1.k.worth"]
    save_file(tensors, path, metadata={"kvfold": json.dumps(header)})


@pytest.mark.parametrize("kind", ["cut", "format", "skew", "nan", "narrow", "missing"])
def test_broken_files_are_refused(file: Path, kind: str) -> None:
    broken(file, kind)
    with pytest.raises(FileError, match=r"truncated or holds no bases|this version reads"):
        Bases.read(file)
    with pytest.raises(PolicyError, match="write one with kvfold calibrate"):
        Policy.parse(f'palu("{file}")')


def test_files_that_are_not_there_or_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        Bases.read(tmp_path / "nothing")
    large = tmp_path / "large"
    with large.open("wb") as sparse:
        sparse.truncate(MAX_BYTES + 1)
    with pytest.raises(FileError, match="bases have at most"):
        Bases.read(large)
