"""Every encoding: what it packs comes back, exactly or nearly; any stream is an InvalidEntry or finite tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.store import DiskTier, HostTier, PrefixStore, Quarantine
from kvfold.store.entry.encodings import ENCODINGS, Encoding, TensorSpec
from kvfold.store.entry.format import Fields, InvalidEntry
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, cold_logits, entry_files, make_prefixes, make_runner
from tests.tiny import prompt

TOKENS, MARKER = prompt(4 * CHUNK + 3), 4 * CHUNK + 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
forms = pytest.mark.parametrize("form", ENCODINGS.values(), ids=list(ENCODINGS))


def slots(num_tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Fields:
    """Keys with a large constant channel and a first token like no other, as models have them; values without."""
    torch.manual_seed(seed)
    k_HTD, v_HTD = torch.randn(3, num_tokens, 8), torch.randn(3, num_tokens, 4)
    k_HTD[..., 5] += 20
    k_HTD[:, :1] *= 50
    return {"k.x": k_HTD.to(dtype), "v.x": v_HTD.to(dtype)}


def specs(fields: Fields) -> dict[str, TensorSpec]:
    return {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in fields.items()}


def error(found: Tensor, x: Tensor) -> float:
    """Of all tokens but the first, against their spread."""
    x, found = x[:, 1:].float(), found[:, 1:].float()
    return float((found - x).norm() / (x - x.mean(1, keepdim=True)).norm())


@forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 65, 200])
def test_what_was_packed_comes_back(form: Encoding, dtype: torch.dtype, num_tokens: int) -> None:
    chunks = [slots(num_tokens, dtype, seed) for seed in range(3)]
    found = form.unpack([form.pack(fields, 0.0) for fields in chunks], specs(chunks[0]))
    for fields, came in zip(chunks, found, strict=True):
        assert specs(came) == specs(fields)
        for name, x in fields.items():
            if form.is_exact:
                assert torch.equal(came[name].view(torch.uint8), x.view(torch.uint8))
            elif num_tokens > 1:
                assert error(came[name], x) < 0.15


def test_packed_keeps_what_is_not_finite() -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")]).view(1, 5, 1)
    form = ENCODINGS["packed"]
    (found,) = form.unpack([form.pack({"x": x}, 0.0)], {"x": TensorSpec(torch.float32, (1, 5, 1))})
    assert torch.equal(found["x"].view(torch.int32), x.view(torch.int32))


def test_cachegen_refuses_what_is_not_finite() -> None:
    with pytest.raises(InputError, match="finite"):
        ENCODINGS["cachegen"].pack({"x": torch.full((1, 5, 1), float("inf"))}, 0.0)


def test_cachegen_keeps_zeros() -> None:
    form, fields = ENCODINGS["cachegen"], {"x": torch.zeros(2, 70, 3)}
    assert form.unpack([form.pack(fields, 0.0)], specs(fields))[0]["x"].abs().max() == 0


def test_later_layers_take_fewer_bytes_and_lose_more() -> None:
    form, fields = ENCODINGS["cachegen"], slots(256)
    packed = [form.pack(fields, depth) for depth in (0.0, 0.4, 0.99)]
    sizes = [sum(x.nbytes for x in one.values()) for one in packed]
    errors = [error(one["v.x"], fields["v.x"]) for one in form.unpack(packed, specs(fields))]
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors) and sizes[2] < 0.8 * sizes[0]


PACKED = {name: form.pack(slots(100), 0.5) for name, form in ENCODINGS.items()}
PLACES = {name: [(key, i) for key, x in packed.items() for i in range(x.nbytes)] for name, packed in PACKED.items()}


@pytest.mark.parametrize("name", ENCODINGS)
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 255))
def test_flipped_bits_are_a_fault_or_finite_tensors(name: str, place: int, flip: int) -> None:
    """With digests out of the way: a decoder neither crashes nor hangs, and what it returns fits."""
    field, at = PLACES[name][place % len(PLACES[name])]
    packed = {key: x.clone() for key, x in PACKED[name].items()}
    packed[field].view(torch.uint8).view(-1)[at] ^= flip
    try:
        (found,) = ENCODINGS[name].unpack([packed], specs(slots(100)))
    except InvalidEntry as error:
        assert error.reason == "corrupt"
        return
    assert specs(found) == specs(slots(100))
    assert name != "cachegen" or all(x.isfinite().all() for x in found.values())


@forms
def test_other_tensors_are_a_fault(form: Encoding) -> None:
    fields = slots(100)
    packed = form.pack(fields, 0.0)
    for name, x in packed.items():
        others = {"less": x.flatten()[:-1], "none": x.flatten()[:0], "more": torch.cat([x, x]), "dtype": x.double()}
        spoilt = [{**packed, name: other} for other in others.values()]
        for one in (*spoilt, {other: y for other, y in packed.items() if other != name}, {**packed, "else": x}):
            with pytest.raises(InvalidEntry):
                form.unpack([packed, one], specs(fields))


# In a store


def read(store: PrefixStore, model: Model) -> tuple[int, Tensor]:
    found = prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS, markers=[MARKER])
    found.sequence.release()
    assert store.flush()
    return found.matched_tokens, found.logits_V


@pytest.mark.parametrize("form", ENCODINGS)
def test_a_hit_is_the_same_run_or_near_it(model: Model, tmp_path: Path, form: str) -> None:
    for matched in (0, MARKER):
        with PrefixStore([DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK, form=form) as store:
            found, logits_V = read(store, model)
            exact_V = cold_logits(model, TOKENS, [MARKER])
        assert found == matched
        if ENCODINGS[form].is_exact or not matched:
            assert torch.equal(logits_V, exact_V)
        else:
            difference = float((logits_V - exact_V).norm() / exact_V.norm())
            assert 0 < difference < 0.5


def test_nobody_is_served_a_form_that_was_not_asked_for(model: Model) -> None:
    host = HostTier(1 << 24)
    found: dict[str, list[int]] = {}
    for form in (*ENCODINGS, *ENCODINGS):
        with PrefixStore([host], chunk_len=CHUNK, form=form) as store:
            found.setdefault(form, []).append(read(store, model)[0])
    assert found == {form: [0, MARKER] for form in ENCODINGS}


def test_a_bad_stream_is_set_aside(model: Model, tmp_path: Path) -> None:
    """Its digest is right, so the decoder finds it; of five entries it is the one that goes."""

    def open_store() -> PrefixStore:
        quarantine = Quarantine(tmp_path / "quarantine")
        return PrefixStore([DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK, form="cachegen", quarantine=quarantine)

    pack = ENCODINGS["cachegen"].pack

    def spoilt(fields: Fields, depth: float) -> Fields:
        packed = pack(fields, depth)
        calls.append(depth)
        return {**packed, "state": torch.zeros_like(packed["state"])} if len(calls) == 6 else packed

    calls: list[float] = []
    with pytest.MonkeyPatch.context() as patch, open_store() as store:
        patch.setattr(ENCODINGS["cachegen"], "pack", spoilt)
        read(store, model)
    assert len(calls) == 5 * model.spec.num_layers and len(entry_files(tmp_path)) == 5
    bad = 5 // model.spec.num_layers
    with open_store() as store:
        assert read(store, model)[0] == bad * CHUNK
        assert store.counters()["quarantined.disk.corrupt"] == 1


def test_snapshots_and_unknown_forms_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match='no form "zip"; forms: exact, packed, cachegen'):
        PrefixStore([], form="zip")
    with PrefixStore([], chunk_len=CHUNK, form="cachegen") as store, pytest.raises(InputError, match="snapshots"):
        make_prefixes(store, model, "knorm + 2x")
