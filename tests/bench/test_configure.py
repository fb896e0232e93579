"""What a user asks for becomes a run, or one clear sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.bench.configure import BenchConfig, default_folder, parse_length
from kvfold.bench.haystack import OWN_PROSE
from kvfold.bench.plan import Shard
from kvfold.bench.suites import SUITES
from kvfold.errors import InputError, KvfoldWarning, PolicyError
from kvfold.models.loader import Model
from kvfold.shortening.embedders.choice import load_embedder
from tests.shortening.embedders.folders import save_static, vectors


def test_the_suite_fills_in_what_is_left_out(model: Model) -> None:
    run = BenchConfig(samples=7, policies=["int4", "keydiff  +  ada", "full"]).describe(
        model, "kvfold bench --samples 7"
    )
    assert (run.samples, run.policies) == (7, ("full", "int4", "keydiff + ada"))
    quick = SUITES["quick"]
    assert (run.memories, run.lengths, run.fidelity) == (quick.memories, quick.lengths, quick.fidelity)
    assert run.weights == model.weights_digest and run.haystack == OWN_PROSE
    assert {"kvfold", "torch", "transformers", "python"} <= run.versions.keys()


def test_policies_may_stand_beside_the_suite_and_modes_are_its_own(model: Model) -> None:
    with pytest.warns(KvfoldWarning, match="learned [+] global [+] int4 is left out"):  # a random model has no network
        run = BenchConfig(suite="curve", also=["int4", "keydiff"]).describe(model, "")
    own = [policy for policy in SUITES["curve"].policies() if "learned" not in policy]
    assert run.policies == ("full", *own, "int4") and run.modes == ("known",)
    assert BenchConfig(suite="curve", modes=["unknown"]).describe(model, "").modes == ("unknown",)
    assert BenchConfig(policies=["int4"], also=["int8"]).describe(model, "").policies == ("full", "int4", "int8")


def test_what_the_model_cannot_run_is_left_out_of_a_suite_unless_it_was_asked_for(model: Model) -> None:
    with pytest.warns(KvfoldWarning) as told:
        run = BenchConfig(suite="methods").describe(model, "")
    left_out = ["learned + global", "minicache(layers=14::2)"]
    assert [policy for policy in SUITES["methods"].policies() if policy not in run.policies] == left_out
    assert [str(each.message).partition(" is left out: ")[0] for each in told] == left_out
    with pytest.warns(KvfoldWarning) as told:
        run = BenchConfig(suite="methods", memories=["50%"], also=["learned + global"]).describe(model, "")
    assert "kvzip + adaptive is left out: " in str(told[0].message)  # it has a size of its own
    assert "learned + global" in run.policies  # where it is an error: test_suite.py


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"suite": "huge"}, 'no suite "huge"; suites: quick, standard, methods, tight, curve'),
        ({"memories": ["0%"]}, 'memory "0%" is no share'),
        ({"memories": ["half"]}, 'memory "half" is no share'),
        ({"memories": ["120%"]}, 'memory "120%" is no share'),
        ({"memories": []}, "nothing to run"),
        ({"modes": ["maybe"]}, 'no mode "maybe"'),
        ({"workloads": []}, "no workload is named"),
    ],
)
def test_nonsense_is_told_at_once(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        BenchConfig(**change)


@pytest.mark.parametrize("policy", ["keydiff + 8x", "nonsense", "snapkv + tova"])
def test_policies_that_cannot_be_sized_are_told_at_once(policy: str) -> None:
    with pytest.raises(PolicyError):
        BenchConfig(policies=[policy])


def test_folders_are_named_by_what_rows_depend_on(model: Model, tmp_path: Path) -> None:
    run = BenchConfig().describe(model, "kvfold bench")
    same = replace(run, command="another", commit="c0ffee", started="later", device="another")
    assert default_folder(run) == default_folder(same)
    assert default_folder(run).name.startswith("llama-quick-")
    assert default_folder(BenchConfig(seed=1).describe(model, "")) != default_folder(run)
    shard = BenchConfig(shard=Shard(3, 12)).describe(model, "")
    assert default_folder(shard).name == default_folder(run).name + "-3of12"
    haystack = tmp_path / "book.txt"
    haystack.write_text("One sentence. Another sentence. " * 40)
    assert default_folder(BenchConfig(haystack=haystack).describe(model, "")) != default_folder(run)


def test_embedders_of_policies_that_shorten_are_recorded(model: Model, tmp_path: Path) -> None:
    def options(*policies: str) -> dict[str, str]:
        return dict(BenchConfig(policies=policies, memories=["own"]).describe(model, "").options)

    folder = save_static(tmp_path / "vectors")
    policy = f'shorten(graph, 2x, embedder="{folder}") + int4'
    first = options("int4", "shorten(head, 2x, embedder=tfidf)", policy)
    assert first == {"embedder tfidf": "tfidf 3", f"embedder {folder}": f"folder {load_embedder(str(folder)).digest}"}
    save_static(folder, vectors(1))
    assert options(policy).keys() < first.keys() and options(policy)[f"embedder {folder}"] not in first.values()
    assert options("int4") == {}


def test_lengths() -> None:
    assert [parse_length(text) for text in ("1000", "4k", " 8k")] == [1000, 4096, 8192]
    for text in ("0", "k", "4K", "1.5k", "-1", ""):
        with pytest.raises(InputError, match="is no length of a prompt"):
            parse_length(text)
