"""Files of labels: what is written is read, and nothing in a damaged or forged one is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.errors import FileError, InputError
from kvfold.models.loader import Model
from kvfold.train.label_format import Labels, read_labels
from kvfold.train.label_rows import NAMES
from kvfold.train.label_surprise import labelled_texts
from kvfold.train.labels import label
from kvfold.train.scorer import TrainingConfig, train_scorer
from tests import tiny

TEXT = "".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(600))
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def teacher() -> Model:
    return tiny.ready("llama")


@pytest.fixture(scope="module")
def labels(teacher: Model) -> Labels:
    return label(teacher, [TEXT, TEXT[:200]], "streaming + 2x", topk=4, window=250, context=150, names=["a", "b"])


@pytest.fixture
def file(labels: Labels, tmp_path: Path) -> Path:
    path = tmp_path / "labels.safetensors"
    labels.write(path)
    return path


def test_what_is_written_is_read(labels: Labels, file: Path, teacher: Model) -> None:
    found = read_labels(file)
    assert found.header == labels.header and found.header.names == ("a", "b")
    assert found.header.weights == teacher.session_digest and found.header.policy == "streaming + 2x"
    assert found.token_ids_T.equal(labels.token_ids_T) and found.text_offsets.equal(labels.text_offsets)
    assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(found.rows, labels.rows, strict=True))
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_is_smaller_than_seven_bytes_a_label(labels: Labels, file: Path) -> None:
    """int32 and fp16 for each of the K labels, and 17 bytes for the row, beside the tokens and the header."""
    count, length = len(labels.rows.position_N), len(labels.token_ids_T)
    assert file.stat().st_size < count * (4 * 6 + 17) + 4 * length + 2000


def _set(name: str, place: tuple[int, ...], value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][place] = value

    return change


def _swap(tensors: Tensors) -> None:
    tensors["topk_logprobs"] = tensors["topk_logprobs"].flip(-1).contiguous()


def _cut(tensors: Tensors, count: int) -> None:
    tensors.update({name: tensors[name][:count] for name in NAMES})


def _cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize(
    "change, message",
    [
        (_set("topk_logprobs", (3, 1), float("nan")), "topk_logprobs are no finite logs"),
        (_set("topk_logprobs", (3, 0), 0.5), "topk_logprobs are no finite logs"),
        (_swap, "topk_logprobs are not sorted"),
        (_set("topk_logprobs", (3, 0), 0.0), "do not add up to 1"),
        (_set("rest_logprobs", (5,), -1e9), "do not add up to 1"),
        (_set("token_logprobs", (5,), float("inf")), "token_logprobs are no finite logs"),
        (_set("topk_ids", (2, 2), 10_000), "outside of the vocabulary"),
        (_set("topk_ids", (2, 2), -1), "outside of the vocabulary"),
        (lambda tensors: tensors["topk_ids"][2].fill_(7), "hold a token twice"),
        (_set("token_ids", (0,), 10_000), "token_ids are not those"),
        (_set("positions", (0,), 5), "positions do not ascend"),
        (_set("positions", (-1,), 10_000), "positions do not ascend"),
        (_set("text_offsets", (1,), 5000), "text_offsets do not divide"),
        (_cast("topk_logprobs", torch.float32), "topk_logprobs is torch.float32"),
        (_cast("positions", torch.int32), "positions is torch.int32"),
        (lambda tensors: tensors.update(topk_ids=tensors["topk_ids"][:-1]), "topk_ids is torch.int32"),
        (lambda tensors: _cut(tensors, 0), "800 of its 800 tokens have no label"),
        (lambda tensors: _cut(tensors, 500), "300 of its 800 tokens have no label"),
        (lambda tensors: tensors["token_logprobs"].fill_(-0.001), "token_logprobs contradict"),
        (lambda tensors: tensors.pop("compressed"), "it holds"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "it holds"),
    ],
)
def test_damaged_tensors_are_refused(file: Path, change: Callable[[Tensors], None], message: str) -> None:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    change(tensors)
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(FileError, match=message):
        read_labels(file)


@pytest.mark.parametrize(
    "change",
    [
        *({"topk": 5}, {"topk": "4"}, {"topk": True}, {"names": ["a"]}, {"names": "ab"}, {"policy": None}),
        *({"weights": "x"}, {"tokenizer": "x"}, {"fingerprint": "x"}, {"version": "x"}, {"model": ""}, {"policy": "+"}),
    ],
)
def test_a_forged_header_is_refused(file: Path, change: dict[str, Any]) -> None:
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["kvfold"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    save_file(tensors, file, metadata={"kvfold": json.dumps(header | change)})
    with pytest.raises(FileError, match="is no file of labels, or damaged"):
        read_labels(file)


def test_other_files_are_refused(file: Path) -> None:
    content = file.read_bytes()
    for damaged in (b"", b"text", content[:-1], content[: len(content) // 2], b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(FileError, match="is no file of labels, or damaged"):
            read_labels(file)
    with pytest.raises(FileError, match="cannot be read"):
        read_labels(file.with_name("absent"))
    save_file({"a": torch.zeros(1)}, file, metadata={"kvfold": '{"format": "kvfold-scorer-1"}'})
    with pytest.raises(FileError, match='has format "kvfold-scorer-1"'):
        read_labels(file)


def test_texts_and_surprises_of_labels(labels: Labels, teacher: Model) -> None:
    found = labelled_texts(labels, teacher.tokenizer, 3, 140)
    ids = labels.token_ids_T.tolist()
    assert [text.token_ids for text in found] == [ids[at : at + 140] for at in (0, 140, 280)]
    assert found[0].surprise_T[0] == torch.inf  # of the first token nothing is known
    expected = -labels.rows.token_logprobs_N[139:279]
    assert found[1].surprise_T.equal(expected)
    for length in (5000, 64):
        with pytest.raises(InputError, match=f"of {length:,} tokens .--length.*; use a --length from 135 to 300"):
            labelled_texts(labels, teacher.tokenizer, 3, length)
    other = tiny.tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(FileError, match="of another tokenizer"):
        labelled_texts(labels, other, 3, 140)


def test_labels_change_what_is_trained(labels: Labels, teacher: Model) -> None:
    """Other surprises weigh queries otherwise; surprises that are all large weigh them alike, as kvzip does."""
    ids, surprises = zip(*labelled_texts(labels, teacher.tokenizer, 3, 140), strict=True)
    config = TrainingConfig(steps=3, hidden=4, batch=64)

    def trained(teacher_score: str, given: list[Tensor] | None) -> Tensor:
        found = train_scorer(teacher, ids, config, teacher=teacher_score, surprises=given)
        return found.predictor.layers[0].outer_HE

    alike = [torch.full_like(each, 100.0) for each in surprises]
    plain, weighted = trained("kvzip", None), trained("kvzip(surprise=8)", list(surprises))
    torch.testing.assert_close(trained("kvzip(surprise=8)", alike), plain)
    assert not torch.allclose(weighted, plain) and not torch.allclose(weighted, trained("kvzip(surprise=8)", None))
    with pytest.raises(InputError, match="labels change nothing"):
        trained("kvzip", list(surprises))
