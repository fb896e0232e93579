"""Saved sessions: they go on token for token, and whatever is not whole, not ours or not of this model is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvfold import session_io as files
from kvfold.errors import FileError, InputError, OutOfPages
from kvfold.models.attach import set_arena
from kvfold.models.loader import Model, wrap
from kvfold.pages.arena import Arena
from kvfold.pages.serialize import dump
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms
from kvfold.session import Session
from tests.engine.runs import Shared, kept
from tests.tiny import build, prompt, ready, tokenizer


def codecs() -> list[str]:
    Policy.parse("full")  # loads the variants
    return [term.name for term in terms("codec") if not (term.variant.needs_below or term.variant.needs_basis)]


POLICIES = [
    *(f"snapkv(window=8) + ada + 2x + {codec}" for codec in codecs()),
    "full",
    "full + int4",
    "full + kivi4",
    "codec(k=int8, v=int2, layers=1:)",
    "h2o + 70tok + int4",
    "tova + 70tok",
    "expected + 70tok",
    "streaming + 70tok + slot",
    "knorm + global + 2x",
    "kvzip + global + 2x + int4",
    "kvzip + global + 2x + fit(tokens=20) + int4",
    "prefill(keydiff + 70tok + fit(prompt, tokens=20)) + decode(tova + 70tok)",
]


@contextmanager
def used_session(model: Model, policy: str) -> Iterator[Session]:
    """A shared segment, a tail, a pinned span, an open block with slots in it, and a token that has not run yet."""
    with Session(model, policy, template=None, page_size=4, open_len=8, chunk_len=32) as session:
        session.extend(prompt(5, seed=3), pin=True)
        session.extend(prompt(120)).generate(max_new_tokens=11)
        with session.fork():  # while it is open, what both read stays a segment
            if "kivi" not in policy or "snapkv" not in policy:
                session.extend(prompt(9, seed=4), compress=False).generate(max_new_tokens=5)
            yield session


def observed(session: Session) -> list[torch.Tensor]:
    return [tensor for layer in session.cache.observed.layers for tensor in layer.tensors()]


@pytest.mark.parametrize("policy", POLICIES)
def test_round_trip_goes_on_token_for_token(model: Model, policy: str, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with used_session(model, policy) as session:
        assert session.cache.open.committed > 0 and session.cache.segments
        session.save(path)
        with Session.load(model, path) as loaded:
            assert loaded.policy == session.policy and loaded.token_ids == session.token_ids
            assert kept(loaded.cache) == kept(session.cache) and loaded.cache.pinned == session.cache.pinned
            assert loaded.stats().slots == session.stats().slots
            torch.testing.assert_close(observed(loaded), observed(session), rtol=0, atol=0)
            assert loaded.stats().bytes_per_step == session.stats().bytes_per_step
            for one in (session, loaded):
                one.generate(max_new_tokens=10)
            assert loaded.token_ids == session.token_ids
            for one in (session, loaded):
                one.extend(prompt(50, seed=8), compress="kivi" not in policy).generate(max_new_tokens=9)
            assert loaded.token_ids == session.token_ids and kept(loaded.cache) == kept(session.cache)


def checksum(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["sha256"])


def test_a_loaded_session_saves_the_same(model: Model, tmp_path: Path) -> None:
    for policy in ("full + kivi2", "h2o + 70tok + int4"):
        first, second = tmp_path / "first", tmp_path / "second"
        with used_session(model, policy) as session:
            session.save(first)
        with Session.load(model, first) as loaded:
            loaded.save(second)
        assert checksum(first) == checksum(second)


def test_all_families(tmp_path: Path, shared: Shared) -> None:
    for family in ("gemma3", "mistral_sliding", "gpt_neox"):
        model = shared(family)
        path = tmp_path / family
        with used_session(model, "full") as session:
            session.save(path)
            with Session.load(model, path) as loaded:
                tokens = loaded.generate(max_new_tokens=30).token_ids
            assert tokens == session.generate(max_new_tokens=30).token_ids


def test_an_empty_session_and_a_conversation(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with Session(model) as session:
        session.save(path)
    with Session.load(model, path) as loaded, Session(model) as session:
        assert loaded.token_ids == []
        for one in (loaded, session):
            one.extend("hello").generate(max_new_tokens=5)
        session.save(path)
        with Session.load(model, path) as again:
            for one in (again, session):
                one.extend("more").generate(max_new_tokens=5)
            assert again.token_ids == session.token_ids


def saved(model: Model, path: Path) -> bytes:
    with Session(model, "snapkv(window=8) + 2x + int4", template=None, page_size=4, open_len=8) as session:
        session.extend(prompt(120)).generate(max_new_tokens=5)
        session.save(path)
    return path.read_bytes()


def refused(model: Model, path: Path, message: str) -> None:
    lent = model.arena.used_bytes
    with pytest.raises(FileError, match=message) as caught:
        Session.load(model, path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert model.arena.used_bytes == lent


def test_truncated_anywhere(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "session"
    whole = saved(model, path)
    for length in (0, 1, 7, 8, 9, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(model, path, "truncated or no saved session")
    path.write_bytes(whole + b"\0")
    refused(model, path, "truncated or no saved session")


def test_one_altered_byte_anywhere(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "session"
    whole = saved(model, path)
    for at in [*range(0, 400, 7), *range(400, len(whole), len(whole) // 60), len(whole) - 1]:
        altered = bytearray(whole)
        altered[at] ^= 0x01
        path.write_bytes(altered)
        refused(model, path, "truncated or no saved session|altered|format")


def test_other_weights_and_other_dtype(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "session"
    saved(model, path)
    refused(ready(seed=5), path, "other weights")
    other = wrap(build(), tokenizer(), kv_dtype=torch.bfloat16)
    set_arena(other.hf, Arena(2**20))
    refused(other, path, "torch.float32 cache, but .* torch.bfloat16")


def test_what_is_no_saved_session(model: Model, tmp_path: Path) -> None:
    refused(model, tmp_path / "missing", "is no file")
    refused(model, tmp_path, "is no file")
    (tmp_path / "text").write_text("not a session")
    refused(model, tmp_path / "text", "no saved session")
    save_file({"x": torch.zeros(3)}, tmp_path / "foreign")
    refused(model, tmp_path / "foreign", "no saved session")


def rewritten(path: Path, **changes: object) -> None:
    """The same file with another header, its checksum made to match."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvfold"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            header[name] = value
    text = json.dumps(header, sort_keys=True)
    save_file(tensors, path, metadata={"kvfold": text, "sha256": files._checksum(text, tensors)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "kvfold-session-0"}, "format"),
        ({"policy": "mystery + 8x"}, "policy this version cannot run"),
        ({"policy": "full"}, "meant something else"),
        ({"0.lens": torch.ones(1, 5, dtype=torch.int64)}, "does not fit its own header"),
        ({"0.lens": torch.full((1, 2), -4)}, "does not fit its own header"),
        ({"1.position": torch.zeros(3, 1, dtype=torch.int32)}, "does not fit its own header"),
        ({"2.open.k": torch.zeros(9, 9, 9)}, "does not fit its own header"),
        ({"pinned": torch.zeros(3, dtype=torch.int64)}, "does not fit its own header"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, "does not fit its own header"),
    ],
)
def test_headers_and_tensors_that_do_not_fit(
    model: Model, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "session"
    saved(model, path)
    rewritten(path, **changes)
    refused(model, path, message)


def test_no_room_for_the_session(tmp_path: Path) -> None:
    model, path = ready(), tmp_path / "session"
    saved(model, path)
    set_arena(model.hf, Arena(3 * 4096, superblock_bytes=4096))
    with pytest.raises(OutOfPages):
        Session.load(model, path)
    assert model.arena.used_bytes == 0


def test_the_temporary_file_never_stays(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "session"
    whole = saved(model, path)
    with Session(model, template=None).extend(prompt(5)) as session:
        with pytest.raises(FileError, match="cannot be written"):
            session.save(tmp_path / "missing" / "session")
        monkeypatch.setattr("os.fsync", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["session"]
    assert path.read_bytes() == whole  # the old file is untouched


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt


def test_a_closed_session_is_not_saved(model: Model, tmp_path: Path) -> None:
    session = Session(model, template=None).extend(prompt(5))
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.save(tmp_path / "session")


def test_relocatable_slots_of_a_head_are_one_piece(model: Model) -> None:
    """However many segments and extents they come from; a group closed early starts another."""
    for policy, pieces in (("full + int4", 1), ("full + kivi4", 4)):
        session = Session(model, policy, template=None, page_size=4, open_len=8)
        for i in range(4):
            session.extend(prompt(35, seed=i))
            session.fork().close()
        assert len(dump(session.cache)["0.lens"]) == pieces
        session.close()
