"""The harness itself, over a local task: `kvfold` against its own `hf` model on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason='needs the LM Evaluation Harness: pip install "kvfold[bench]"')

from kvfold.bench.lm_eval import KvfoldLM
from kvfold.errors import InputError, KvfoldWarning
from tests.tiny import build, tokenizer

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
{more}
"""
CHOICES = "doc_to_choice: [' yes it is', ' no', ' it may be']\ndoc_to_target: 0"
REPLY = "doc_to_target: '{{answer}}'\ngeneration_kwargs: {until: ['e'], max_gen_toks: 12, do_sample: false}"
ROLLING = "doc_to_target: '{{context}}'\nmetric_list: [{metric: bits_per_byte}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-llama"
    build().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "to", "the", "sea"]
    texts = [" ".join(words[(7 * i + j) % len(words)] for j in range(40 + 10 * i)) for i in range(3)]
    rows.write_text("".join(json.dumps({"context": text, "answer": "yes"}) + "\n" for text in texts))
    for name, kind, more in (
        ("choice", "multiple_choice", CHOICES),
        ("reply", "generate_until", REPLY),
        ("rolling", "loglikelihood_rolling", ROLLING),
    ):
        text = TASK.format(name=name, rows=rows, kind=kind, more=more)
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def evaluate(model: str, arguments: dict[str, Any], tasks: Path, name: str) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[name], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    return found


def responses(found: dict[str, Any], name: str) -> list[Any]:
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def flat(found: Any) -> list[Any]:
    return [each for part in found for each in flat(part)] if isinstance(found, (list, tuple)) else [found]


@pytest.mark.parametrize("name", ["choice", "reply", "rolling"])
def test_full_in_fp32_is_the_hf_model(folder: Path, tasks: Path, name: str) -> None:
    theirs = evaluate("hf", {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}, tasks, name)
    ours = evaluate("kvfold", {"model": str(folder), "dtype": "float32", "device": "cpu"}, tasks, name)
    mine, other = flat(responses(ours, name)), flat(responses(theirs, name))
    assert len(mine) == len(other) >= 3
    for a, b in zip(mine, other, strict=True):
        assert a == pytest.approx(b, abs=1e-3) if isinstance(b, float) else a == b


def test_a_policy_changes_likelihoods_and_is_told_in_the_results(folder: Path, tasks: Path) -> None:
    policy = "streaming + 2x + protect(sinks=1, recent=1)"
    arguments = {"model": str(folder), "dtype": "float32", "device": "cpu"}
    full = evaluate("kvfold", arguments, tasks, "choice")
    ours = evaluate("kvfold", arguments | {"policy": policy}, tasks, "choice")
    assert flat(responses(ours, "choice")) != flat(responses(full, "choice"))
    assert ours["config"]["kvfold_kept_whole"] == 0
    assert ours["config"]["kvfold_read"] == 3  # the options of a question share its context
    assert "streaming" in ours["config"]["kvfold_policy"]


def test_contexts_that_are_too_short_are_told(folder: Path, tasks: Path) -> None:
    arguments = {"model": str(folder), "dtype": "float32", "device": "cpu", "policy": "keydiff + 64x"}
    with pytest.warns(KvfoldWarning, match="3 of 3 contexts were too short"):
        found = evaluate("kvfold", arguments, tasks, "choice")
    assert found["config"]["kvfold_kept_whole"] == 3


def test_long_inputs_are_cut_from_the_left_as_the_hf_model_does(folder: Path, tasks: Path) -> None:
    short = {"max_length": 64, "dtype": "float32", "device": "cpu"}
    for name in ("choice", "rolling", "reply"):
        theirs = evaluate("hf", {"pretrained": str(folder), **short}, tasks, name)
        ours = evaluate("kvfold", {"model": str(folder), **short}, tasks, name)
        for a, b in zip(flat(responses(ours, name)), flat(responses(theirs, name)), strict=True):
            assert a == pytest.approx(b, abs=1e-3) if isinstance(b, float) else a == b


def test_options_that_mean_nothing_here_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="batch_size is auto"):
        KvfoldLM(str(folder), device="cpu", batch_size="auto")
    model = KvfoldLM(str(folder), device="cpu")
    with pytest.raises(InputError, match="generation option num_beams"):
        model._ask("text", {"until": [], "num_beams": 4})
    with pytest.raises(InputError, match="leave no room"):
        model._ask("text", {"until": [], "max_gen_toks": 5000})
