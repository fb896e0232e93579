"""An engine over an entry's rows computes what kvfold computes; what blocks of one length cannot hold is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.errors import InputError, KvfoldError, ModelError, PolicyError
from kvfold.packed import PackedPrefix, pack
from kvfold.store.key import Key
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests import tiny
from tests.packed.common import TEXT, engine_logits, read, saved

POLICY = "keydiff + uniform + 4x"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "llama3_rope", "yarn"])
def test_an_engine_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", family)
    tier = SharedDiskTier(tmp_path / "store")
    packed = pack(model, TEXT, POLICY, tier, block_size=16)
    ids = packed.prompt_token_ids(model.tokenizer, "Who?")
    with kvfold.Session(model, packed.policy) as session:
        session.extend(TEXT)
        assert len(session.token_ids) == packed.num_tokens
        session.extend("\n\nWho?", compress=False)
        expected = session.next_logits()
        assert session.token_ids[packed.num_tokens :] == ids[packed.num_slots :]
    found = engine_logits(model, tier, packed, ids[packed.num_slots :])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert packed.num_slots % 16 == 0 and packed.num_slots < packed.num_tokens / 3


def test_token_ids_are_packed_as_they_are(tmp_path: Path) -> None:
    model, tier = saved(tmp_path / "model"), SharedDiskTier(tmp_path / "store")
    ids, more = tiny.prompt(300), tiny.prompt(9, seed=2)
    packed = pack(model, ids, POLICY, tier, block_size=16)
    assert (packed.num_tokens, packed.has_template) == (300, False)
    with kvfold.Session(model, packed.policy, template=None) as session:
        session.extend(ids).extend(more, compress=False)
        expected = session.next_logits()
    torch.testing.assert_close(engine_logits(model, tier, packed, more), expected, rtol=1e-4, atol=1e-4)


def test_a_name_is_that_of_the_content(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    tier = SharedDiskTier(tmp_path / "store")
    packed = pack(model, TEXT, POLICY, tier, block_size=16)
    assert pack(model, TEXT, POLICY, tier, block_size=16) == packed
    other = pack(model, TEXT[1:], POLICY, tier, block_size=16)
    assert other.entry != packed.entry
    assert set(tier.keys()) == {Key.parse(packed.entry), Key.parse(other.entry)}
    reader = read(tier, packed)
    assert (reader.num_slots, reader.num_tokens) == (packed.num_slots, packed.num_tokens)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("full", "evicts nothing"),
        ("keydiff + ada + 4x", r"different lengths \(ada\)"),
        ("keydiff + pyramid + 4x", r"different lengths \(pyramid\)"),
        ("keydiff + 4x + int4", "quantises slots"),
        ("keydiff + 4x + fit", r"a bias \(fit\)"),
        ("keydiff + 4x + slot", "closes up positions"),
        ("keydiff + 12.5%mem", "a size in bytes"),
        ("keydiff + 4x + quest", r"reads selected slots \(quest\)"),
        ("keydiff + 4x + shorten(graph, 50%)", "shortens the text"),
        ("snapkv + 4x", "question-aware"),
    ],
)
def test_policies_are_refused_by_name(policy: str, reason: str, model: kvfold.Model, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=reason):
        pack(model, TEXT, policy, SharedDiskTier(tmp_path), block_size=16)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma3", "sliding-window layers"), ("mistral_sliding", "sliding-window"), ("dynamic_rope", "length-dependent")],
)
def test_models_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        pack(saved(tmp_path / "model", family), TEXT, POLICY, SharedDiskTier(tmp_path / "store"), block_size=16)


def test_two_dtypes_are_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    mixed = kvfold.wrap(model.hf, model.tokenizer, kv_dtype=torch.bfloat16)
    with pytest.raises(ModelError, match=r"computes in float32 and keeps its KV cache in bfloat16; give one --dtype"):
        pack(mixed, TEXT, POLICY, SharedDiskTier(tmp_path / "store"))


def test_a_document_that_saves_nothing_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    with pytest.raises(InputError, match=r"has \d+ tokens, and 4x in blocks of 128 keeps 128, which saves nothing"):
        pack(model, TEXT[:100], POLICY, SharedDiskTier(tmp_path / "store"))


def test_a_record_is_read_back_and_checked(tmp_path: Path) -> None:
    packed = PackedPrefix("e", 16, 99, 64, 5, "m", "float32", "p", True)
    packed.save(tmp_path / "r.json")
    assert PackedPrefix.load(tmp_path / "r.json") == packed
    text = (tmp_path / "r.json").read_text()
    quoted, foreign, empty = text.replace("16", '"16"'), text.replace("packed prefix 1", "x"), text.replace("16", "0")
    for bad in (quoted, foreign, empty, text[:-9], "[]"):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(KvfoldError, match="kvfold pack --out"):
            PackedPrefix.load(tmp_path / "bad.json")


def test_an_answer_that_does_not_name_the_entry_is_an_error() -> None:
    packed = PackedPrefix("e", 16, 99, 64, 5, "m", "float32", "p", True)
    packed.check({"kvfold_entry": "e"})
    with pytest.raises(InputError, match="was refused: why"):
        packed.check({"kvfold_error": "why"})
    for told in (None, {}, {"kvfold_entry": "other"}):
        with pytest.raises(InputError, match="does not say that the packed prefix was served"):
            packed.check(told)
