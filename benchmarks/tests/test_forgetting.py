"""The benchmark of forgetting: facts, what each arm may change, scores, and its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import forgetting_page
from benchmarks.commands import run_main
from benchmarks.docs_section import with_section
from benchmarks.forgetting import main
from benchmarks.forgetting_arms import FullLearner, LoraLearner
from benchmarks.forgetting_bank import BankLearner, Choice
from benchmarks.forgetting_facts import Example, Rows, as_rows, make_facts
from benchmarks.forgetting_train import Domain, exact_match, forgetting_at, train_step
from kvfold.errors import InputError
from tests.recurse.texts import save
from tests.tiny import build, greedy, prompt, tokenizer

CPU = torch.device("cpu")
TEXT = prompt(12)
CHOICES: list[Choice] = ["tfidf", "tf", "random"]


@pytest.fixture
def hf() -> Any:
    found = build("llama").requires_grad_(False)
    found.set_attn_implementation("eager")
    return found


def _domain() -> Domain:
    return Domain.of(make_facts("A", 4, 0), tokenizer(), CPU)


def _trained(learner: FullLearner, *, steps: int = 1) -> None:
    optimizer = torch.optim.Adam(learner.trained, lr=0.01)
    for step in range(steps):
        train_step(learner, optimizer, _domain().batch(6, torch.Generator().manual_seed(step)))


def _bank(hf: Any, choice: Choice, top: int = 5) -> BankLearner:
    bank = BankLearner(hf, TEXT, choice, top)
    bank.observe_background([_domain().batch(2, torch.Generator().manual_seed(seed)) for seed in range(4)])
    return bank


def test_the_wording_that_asks_is_not_trained() -> None:
    facts, others = make_facts("A", 9, 3), make_facts("B", 9, 3)
    assert len(facts.asked) == 9 and len(facts.told) == 36
    assert not {one.prompt for one in facts.asked} & {one.prompt for one in facts.told}
    assert facts == make_facts("A", 9, 3) != make_facts("A", 9, 4)
    assert not {one.prompt for one in facts.told} & {one.prompt for one in others.told}
    with pytest.raises(InputError, match="1 facts are asked for; a domain has 2 to 800"):
        make_facts("A", 1, 0)


def test_rows_mark_the_tokens_of_answers() -> None:
    examples = [Example("It is", "red"), Example("Its long name is", "Oslo")]
    rows = as_rows(examples, tokenizer(), CPU)
    for row, one in enumerate(examples):
        assert tokenizer().decode(rows.next_BT[row][rows.answer_BT[row]]) == f" {one.answer}"
        assert tokenizer().decode(rows.ids_BT[row][rows.mask_BT[row]]) == f"{one.prompt} {one.answer}"[:-1]


def test_exact_match_is_what_greedy_decoding_writes(hf: Any) -> None:
    ids = prompt(10)
    new = torch.tensor(ids + greedy(hf, ids, 3))
    answer_T = torch.arange(12) >= 9
    right = Rows(new[None, :-1], torch.ones(1, 12, dtype=torch.bool), answer_T[None], new[None, 1:])
    wrong = Rows(right.ids_BT, right.mask_BT, right.answer_BT, (right.next_BT + (torch.arange(12) == 11)) % 90)
    assert exact_match(FullLearner(hf), right) == 1.0
    assert exact_match(FullLearner(hf), wrong) == 0.0


def test_a_bank_begins_as_the_cache_of_its_text(hf: Any) -> None:
    rows = as_rows([Example("A b c", "d"), Example("A longer row here", "e")], tokenizer(), CPU)
    found_BTE = BankLearner(hf, TEXT).hidden(rows)
    for row, mask_T in enumerate(rows.mask_BT):
        ids = torch.tensor([[*TEXT, *rows.ids_BT[row][mask_T].tolist()]])
        expected_TE = hf.model(ids)[0][0, len(TEXT) :]
        torch.testing.assert_close(found_BTE[row][mask_T], expected_TE, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_sparse_step_changes_the_chosen_slots_alone(hf: Any, choice: Choice) -> None:
    weights = [each.clone() for each in hf.parameters()]
    bank = _bank(hf, choice)
    optimizer = torch.optim.Adam(bank.trained, lr=0.01)
    for step in range(3):
        before = bank.state()
        train_step(bank, optimizer, _domain().batch(6, torch.Generator().manual_seed(step)))
        k_LHM, v_LHM = ((new != old).any(-1) for new, old in zip(bank.trained, before, strict=True))
        changed_LHM = k_LHM | v_LHM
        assert torch.equal(changed_LHM, bank.choose())  # the choice follows the last forward, which was the step's
        assert changed_LHM.sum() == 5 and not changed_LHM[..., 0].any()
    assert all(torch.equal(new, old) for new, old in zip(hf.parameters(), weights, strict=True))


def test_a_dense_step_changes_every_slot_but_the_sink(hf: Any) -> None:
    bank = BankLearner(hf, TEXT)
    before = bank.state()
    _trained(bank)
    changed_LHM = (bank.trained[1] != before[1]).any(-1)
    assert changed_LHM[..., 1:].all() and not changed_LHM[..., 0].any()
    assert bank.touched_LHM.sum() == changed_LHM.sum()
    bank.restore(before)
    assert all(torch.equal(new, old) for new, old in zip(bank.trained, before, strict=True))
    assert not bank.touched_LHM.any()


def test_idf_leaves_slots_alone_that_every_background_batch_uses(hf: Any) -> None:
    bank = BankLearner(hf, TEXT, "tf", 2)
    bank.mass_LHM.zero_()
    bank.mass_LHM.view(-1)[[1, 2, 3]] = torch.tensor([6.0, 3.0, 1.0])
    bank.used_LHM.view(-1)[[1, 2]], bank.num_background = torch.tensor([999.0, 9.0]), 1000
    assert bank.choose().flatten().nonzero().flatten().tolist() == [1, 2]
    bank.choice = "tfidf"
    assert bank.choose().flatten().nonzero().flatten().tolist() == [2, 3]


@pytest.mark.parametrize("kind", [FullLearner, LoraLearner])
def test_closing_leaves_the_model_as_it_was(hf: Any, kind: Callable[[Any], FullLearner]) -> None:
    torch.manual_seed(0)
    rows, weights = _domain().asked, [each.clone() for each in hf.parameters()]
    before_BTE = FullLearner(hf).hidden(rows)
    learner = kind(hf.requires_grad_(kind is FullLearner))
    torch.testing.assert_close(learner.hidden(rows), before_BTE)
    _trained(learner, steps=2)
    same = [torch.equal(new, old) for new, old in zip(hf.parameters(), weights, strict=True)]
    assert not any(same) if kind is FullLearner else all(same)
    assert not torch.allclose(learner.hidden(rows), before_BTE, atol=1e-3)
    learner.close()
    assert torch.equal(FullLearner(hf).hidden(rows), before_BTE)


def test_forgetting_is_read_where_b_is_reached() -> None:
    a, b = [0.8, 0.6, 0.2], [0.0, 0.4, 0.8]
    assert forgetting_at(0.4, 0.8, a, b) == pytest.approx(0.25)
    assert forgetting_at(0.6, 0.8, a, b) == pytest.approx(0.5)  # half way between the points
    assert forgetting_at(0.9, 0.8, a, b) is None


def test_every_arm_has_its_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--model", str(save(tmp_path)), "--facts", "4", "--slots", "8", "--steps", "1", "--a-steps", "1"]
    assert run_main(main, [*arguments, "--device", "cpu", "--every", "1", "--seeds", "1", "--rates", "0.01"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["arm"] for row in found if "rate" in row} == {"tfidf", "tf", "random", "dense", "lora", "full"}
    touched = {row["arm"]: row["touched"] for row in found if "touched" in row}
    assert touched["dense"] == 0.875 and 0 < touched["random"] < touched["dense"]
    assert all(row["curve"]["steps"] == [0, 1] or row["b_after"] >= 0.95 for row in found if "rate" in row)
    assert [row["arm"] for row in found if "rate" not in row] == ["bank, A", "lora, A", "full, A"]


def test_the_page_is_what_the_kept_rows_give() -> None:
    page = forgetting_page.PAGE.read_text(encoding="utf-8")
    assert page == with_section(page, forgetting_page.BEGIN, forgetting_page.END, forgetting_page.kept())


def _row(rate: float, seed: int, a: float, b: float) -> dict[str, Any]:
    curve = {"steps": [0, 5], "a": [1.0, a], "b": [0.0, b]}
    about = {"facts": 4, "slots": 8, "top": 0.1, "steps": 5, "model": "m", "device": "d", "date": "2026", "commit": "c"}
    return {"arm": "dense", "rate": rate, "seed": seed, "a_before": 1.0, "touched": 0.98, "curve": curve, **about}


ROWS = [
    *(_row(0.1, 0, 0.5, 0.8), _row(0.1, 1, 0.3, 0.8)),
    *(_row(0.2, 0, 0.2, 0.8), _row(0.2, 1, 0.2, 0.8)),
    *(_row(0.01, 0, 1.0, 0.8), _row(0.01, 1, 1.0, 0.2)),
]


def test_an_arm_is_shown_at_the_rate_that_forgets_least_among_those_that_learn_in_every_seed() -> None:
    found = forgetting_page.best(ROWS, "dense", 0.8)
    assert found is not None and found.rate == 0.1 and found.forgetting.mean == pytest.approx(0.6)
    assert forgetting_page.best(ROWS, "dense", 0.9) is None


def test_the_section_has_complete_seeds_alone() -> None:
    shown = forgetting_page.body([*ROWS, _row(0.1, 2, 0.0, 0.8)])
    assert "the mean of 2 seeds" in " ".join(shown.split())
    assert "| all slots (prefix tuning) | 98% | 100% | 19 [16, 22] | 38 [31, 44] | 56 [47, 66] | – |" in shown
    with pytest.raises(InputError, match="1 seeds have one row"):
        forgetting_page.body(ROWS[::2])
