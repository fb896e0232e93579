"""The term `aqua`: what it stores, where, what it refuses, and the file it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.codec import Aqua, Int2, Int4, Int8, Slots
from kvfold.codec.lift import Lift
from kvfold.codec.lifts import Lifts, lifted_layers
from kvfold.core import Rope
from kvfold.errors import FileError, PolicyError
from kvfold.models.check import check_policy
from kvfold.policy import Policy
from tests.codec.lifts import random_lifts
from tests.pages.tiny import tiny_spec

SPEC = tiny_spec(num_layers=4, num_heads=2, head_dim=16)
ROPE = SPEC.layers[0].rope


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lifts.safetensors"
    random_lifts(SPEC).write(path)
    return path


def test_a_lift_maps_all_heads_of_a_token_before_rope() -> None:
    """Token by token: both heads turned back, side by side, through the map, and turned to their position."""
    side = random_lifts(SPEC).layers[1]["k"]
    below_HnD, position_n = torch.randn(2, 3, 16), torch.tensor([4, 5, 90])
    assert ROPE is not None
    other = replace(ROPE, frequencies=tuple(2 * each for each in ROPE.frequencies))
    found = Lift(side.weight_CC, side.bias_C, ROPE, other)(below_HnD, position_n)
    for token, at in enumerate(position_n):
        x_C = torch.cat([ROPE.rotate(head, -at) for head in below_HnD[:, token]])
        told_C = x_C @ side.weight_CC + side.bias_C
        expected = torch.stack([other.rotate(head, at) for head in told_C.view(2, 16)])
        torch.testing.assert_close(found[:, token], expected, atol=1e-5, rtol=1e-4)


def test_the_rest_is_stored_rotated(file: Path) -> None:
    """Codes are those of the difference: what is told exactly costs no error, and one large channel is shared out."""
    codec, told = Aqua(str(file), Int8()), torch.randn(6, 16) * 100
    rest = torch.zeros(6, 16)
    rest[:, 3] = torch.arange(6.0)
    fields = codec.encode("k", Slots(told + rest, torch.zeros(6, dtype=torch.int64), told), {})
    assert {name: part.shape for name, part in fields.items()} == {"code": (6, 16), "scale": (6, 1), "zero": (6, 1)}
    # A channel of 4 becomes 16 of plus or minus 1.
    torch.testing.assert_close(fields["scale"][4].float(), torch.tensor([2 / 255]), rtol=0.02, atol=0)
    torch.testing.assert_close(codec.decode("k", fields, torch.float32, told), told + rest, atol=0.05, rtol=0)
    assert torch.equal(codec.decode("k", fields, torch.float32, told)[0], told[0])


def test_every_second_layer_is_told(file: Path) -> None:
    assert lifted_layers(SPEC) == [1, 3] and lifted_layers(tiny_spec(num_layers=5)) == [1, 3]
    assert lifted_layers(tiny_spec(num_layers=6, sliding={1: 8})) == [3, 5]
    codec = Aqua(str(file))
    plan = Policy.parse(f'aqua("{file}", layers=:3)').codec
    assert [plan.sides(i, 4)[0] for i in range(3)] == [Int4(), codec, Int4()]
    assert set(plan.codecs) == {codec, Int4(), plan.sides(3, 4)[0]}
    mixed = Policy.parse(f'codec(k=aqua("{file}", int4, roots=int8), v=int2)').codec
    assert mixed.sides(0, 4) == (Int8(), Int2()) and mixed.sides(1, 4)[1] == Int2()


def test_a_file_says_what_was_written(file: Path) -> None:
    wrote, read = random_lifts(SPEC), Lifts.read(file)
    assert (read.digest, read.model, list(read.layers)) == (wrote.digest, "tiny", [1, 3])
    assert read.digest != random_lifts(SPEC, seed=1).digest
    assert read.layers[3]["v"].weight_CC.equal(wrote.layers[3]["v"].weight_CC)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_fingerprints_know_the_content_and_not_the_name(file: Path, tmp_path: Path) -> None:
    other, twin = tmp_path / "other.safetensors", tmp_path / "twin.safetensors"
    random_lifts(SPEC, seed=1).write(other)
    twin.write_bytes(file.read_bytes())
    for form in ('aqua("{}")', 'codec(k=int4, v=aqua("{}", int4))'):
        mine, same, differs = (Policy.parse(form.format(path)).fingerprint for path in (file, twin, other))
        assert mine == same != differs
    assert len({Policy.parse(f'aqua("{file}", {more})').fingerprint for more in ("int2", "int4", "roots=int8")}) == 3


def test_what_is_written_can_be_read_again(file: Path) -> None:
    policy = Policy.parse(f'aqua("{file}", int4, roots=int8)')
    assert policy.codec.k == Aqua(str(file), Int4(), Int8())
    assert Policy.parse(policy.short) == Policy.parse(str(policy)) == policy
    random_lifts(SPEC, seed=1).write(file)
    with pytest.raises(PolicyError, match=r"its content is sha_\w+, not sha_\w+; measure it anew"):
        Policy.parse(str(policy))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ('aqua("{}", kivi4)', "rest cannot be coded by kivi4; use native, bf16, fp8, int8, int4 or int2"),
        ('aqua("{}", roots=minicache)', "roots cannot be coded by minicache"),
        ('knorm + 2x + aqua("{}")', "which may be evicted there"),
        ('quest + aqua("{}")', "reader quest cannot read some of its pages alone"),
        ('snapkv + 2x + fastkv + aqua("{}")', "may be evicted there"),
    ],
)
def test_what_cannot_work_is_refused(file: Path, policy: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy.parse(policy.format(file))


def test_models_that_it_does_not_fit_are_refused(file: Path) -> None:
    policy = Policy.parse(f'aqua("{file}")')
    check_policy(policy, SPEC)
    others = [
        tiny_spec(num_layers=2),
        tiny_spec(num_layers=4, num_heads=4),
        tiny_spec(num_layers=4, sliding={0: 8}),
        replace(SPEC, digest=lambda: "of others"),
    ]
    for other in others:
        with pytest.raises(PolicyError, match="was measured on tiny, other weights than those of tiny"):
            check_policy(policy, other)
    turning = Rope(tuple(0.1 for _ in range(8)), depends_on_length=True)
    with pytest.raises(PolicyError, match="RoPE frequencies of tiny depend on the length"):
        check_policy(policy, tiny_spec(num_layers=4, turned=turning))


@pytest.mark.parametrize("kind", ["cut", "format", "nan", "narrow", "missing"])
def test_broken_files_are_refused(file: Path, kind: str) -> None:
    tensors, header = load_file(file), {"format": "kvfold-lifts-1", "model": "", "weights": "", "measured": ""}
    if kind == "format":
        header["format"] = "kvfold-lifts-2"
    elif kind == "nan":
        tensors["1.v.bias"][0] = torch.nan
    elif kind == "narrow":
        tensors["1.k.weight"] = tensors["1.k.weight"][:, :5].contiguous()
    elif kind == "missing":
        del tensors["3.k.bias"]
    save_file(tensors, file, metadata={"kvfold": json.dumps(header)})
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(FileError, match=r"truncated or holds no lifts|this version reads"):
        Lifts.read(file)
    with pytest.raises(PolicyError, match="write one with kvfold calibrate --for aqua"):
        Policy.parse(f'aqua("{file}")')


def test_files_that_are_not_there_or_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        Lifts.read(tmp_path / "nothing")
    large = tmp_path / "large"
    with large.open("wb") as sparse:
        sparse.truncate(Lifts.MAX_BYTES + 1)
    with pytest.raises(FileError, match="lifts have at most"):
        Lifts.read(large)
