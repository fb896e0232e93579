"""`rope="yarn:4"`: the same tokens as transformers under the same config, and refused by name where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import kvfold
from kvfold.errors import FileError, InputError, ModelError
from tests import tiny


def _saved(folder: Path, family: str) -> Path:
    tiny.build(family).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = _saved(tmp_path, family)
    model = kvfold.load(str(folder), rope="yarn:4", dtype="float32")
    assert model.spec.max_positions == 4096
    config = AutoConfig.from_pretrained(folder)
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": theta,
    }  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="float32").eval()
    plain.generation_config.eos_token_id = None
    ids = tiny.prompt(1200)
    with kvfold.Session(model, "full", template=None) as session:
        assert session.extend(ids).generate(max_new_tokens=12).token_ids == tiny.greedy(plain, ids, 12)


def test_a_session_of_another_scaling_is_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "model", "llama")
    long, plain = kvfold.load(str(folder), rope="yarn:2"), kvfold.load(str(folder))
    assert long.weights_digest == plain.weights_digest and long.values_digest != plain.values_digest
    with kvfold.Session(long, template=None) as session:
        session.extend(tiny.prompt(40)).save(tmp_path / "a.kvfold")
    with kvfold.Session.load(long, tmp_path / "a.kvfold") as again:
        assert len(again.token_ids) == 40
    with pytest.raises(FileError, match="another rope"):
        kvfold.Session.load(plain, tmp_path / "a.kvfold")


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gemma3", "gemma3_text has other rotary frequencies"),
        ("mistral_sliding", "mistral has sliding-window layers"),
        ("llama3_rope", r"llama was trained with scaled rotary frequencies \(llama3\)"),
    ],
)
def test_what_cannot_be_scaled_is_refused_by_name(tmp_path: Path, family: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        kvfold.load(str(_saved(tmp_path, family)), rope="yarn:4")


@pytest.mark.parametrize("text", ["yarn", "yarn:1", "yarn:0.5", "yarn:65", "linear:2", "4", "yarn:nan", ""])
def test_other_scalings_are_told(text: str) -> None:
    with pytest.raises(InputError, match="write yarn: and a factor"):
        kvfold.load("smollm2-135m", rope=text)
