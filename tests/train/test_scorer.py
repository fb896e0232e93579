"""Training on a near-zero-size model: examples are the teacher's, and what was trained scores in sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.engine.runner import Runner
from kvfold.errors import FileError, InputError
from kvfold.models.loader import Model
from kvfold.score import KVzip, KVzipPlus
from kvfold.score.predictor import LayerPredictor, save_predictor
from kvfold.session import Session
from kvfold.train.calibration_data import KINDS, file_texts, own_texts
from kvfold.train.scorer import TrainingConfig, evaluate, fit_layer, spearman, train_scorer
from kvfold.train.traces import MIN_LEN, Examples, trace
from tests.engine.test_replay import read, watched
from tests.tiny import prompt, ready, tokenizer

FAST = TrainingConfig(steps=20, hidden=4, batch=64)
TEXTS = [prompt(140, seed=seed) for seed in range(6)]


@pytest.fixture(scope="module")
def model() -> Model:
    return ready("gemma3")  # two of its three layers are sliding windows


@pytest.fixture(scope="module")
def file(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scorer") / "gemma.safetensors"
    save_predictor(train_scorer(model, TEXTS, FAST).predictor, path)
    return path


@pytest.mark.parametrize("name, teacher", [("kvzip_plus", KVzipPlus()), ("kvzip(surprise=2)", KVzip(surprise=2.0))])
def test_examples_are_what_the_teacher_sees(model: Model, name: str, teacher: KVzip | KVzipPlus) -> None:
    """The same keys, values and scores as in a run of the teacher, but for the sinks; and the model is as before."""
    with watched(type(teacher)) as seen:
        read(model, f"{name} + 2x", TEXTS[0], chunk_len=512).release()
    free = model.arena.free_bytes
    found = trace(Runner(model.hf, model.spec, model.arena), TEXTS[0], name)
    assert model.arena.free_bytes == free
    assert list(found) == list(model.spec.compressible_layers) == [1]
    view = seen.views[1]
    torch.testing.assert_close(found[1].y_HN, teacher.score(view)[:, 4:], rtol=1e-4, atol=1e-6)
    assert view.spec.rope is not None
    k_HND = view.spec.rope.rotate(view.k_RSD, -view.position_RS)
    expected = torch.cat((k_HND, view.v_RSD), -1)[:, 4:]
    torch.testing.assert_close(found[1].x_HNF.float(), expected, rtol=2e-3, atol=2e-3)


def test_scores_of_an_example_are_shares() -> None:
    """Outputs ten thousand times as large change hidden states by more than all of them."""
    model = ready("gemma3", seed=7)
    with torch.no_grad():
        model.hf.model.layers[1].self_attn.o_proj.weight *= 1e4
    found = trace(Runner(model.hf, model.spec, model.arena), TEXTS[0], "kvzip_plus")
    assert float(found[1].y_HN.max()) == 1


def test_training_is_told_step_by_step_and_repeats_itself(model: Model) -> None:
    told: list[tuple[str, int, int | None]] = []
    first = train_scorer(model, TEXTS, FAST, lambda *stage: told.append(stage))
    assert told == [*(("read texts twice", n, 6) for n in range(1, 7)), ("fit layers", 1, 1)]
    second = train_scorer(model, TEXTS, FAST)
    assert first.qualities == second.qualities and [row.layer for row in first.qualities] == [1]
    assert first.predictor.layers[1].inner_HFE.equal(second.predictor.layers[1].inner_HFE)


@pytest.mark.parametrize("rest", ["global + 2x", "ada + 70tok + int4", "80tok + between_chunks(chunk=64)"])
def test_a_session_scores_with_the_file(model: Model, file: Path, rest: str) -> None:
    with Session(model, f'learned(file="{file}") + {rest}', template=None) as session:
        session.extend(prompt(200))
        session.generate(max_new_tokens=40)
        assert session.stats().mean_slots < 200


def test_the_bound_holds_while_decoding(model: Model, file: Path) -> None:
    with Session(model, f'learned(file="{file}") + 80tok', template=None) as session:
        session.extend(prompt(200))
        session.generate(max_new_tokens=100)
        assert max(len(session.kept(1, head)) for head in range(2)) <= 80


def test_other_weights_are_refused_before_anything_is_read(file: Path) -> None:
    with pytest.raises(FileError, match="trained on other weights than those of"):
        Session(ready("gemma3", seed=1), f'learned(file="{file}") + 2x')


def test_too_little_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="1 text cannot be fitted and judged"):
        train_scorer(model, TEXTS[:1])
    with pytest.raises(InputError, match="a text of 100 tokens teaches nothing"):
        train_scorer(model, [prompt(100), prompt(200)])
    with pytest.raises(InputError, match='"keydiff" does not read a text twice'):
        train_scorer(model, TEXTS, teacher="keydiff")


def test_own_texts_are_of_every_kind_and_follow_the_seed() -> None:
    found = list(own_texts(tokenizer(), len(KINDS), 4000, 0))
    assert len({tuple(ids) for ids in found}) == len(KINDS)
    assert all(2000 < len(ids) < 4200 for ids in found)
    assert list(own_texts(tokenizer(), 1, 4000, 0)) == found[:1]
    assert list(own_texts(tokenizer(), 1, 4000, 1)) != found[:1]


def test_files_are_cut_into_even_pieces(tmp_path: Path) -> None:
    path, words = tmp_path / "a.txt", tokenizer()
    path.write_text("".join(chr(65 + number % 26) for number in range(2000)), encoding="utf-8")
    pieces = list(file_texts(words, [path, path], 3, 200))
    assert [len(piece) for piece in pieces] == [200] * 3
    assert words.decode(pieces[1]) == (path.read_text() * 2)[1200:1400]
    with pytest.raises(InputError, match=r"0 pieces of 3000 .*; use a --length from 135 to 1000"):
        file_texts(words, [path], 3, 3000)


def test_the_shortest_text_that_is_taken_can_be_read(model: Model) -> None:
    """A text that passes the check does not fail by its size later."""
    runner = Runner(model.hf, model.spec, model.arena)
    assert trace(runner, prompt(MIN_LEN), "kvzip")
    with pytest.raises(InputError, match=f"at least {MIN_LEN}"):
        trace(runner, prompt(MIN_LEN - 1), "kvzip")


LAYER = TrainingConfig(steps=400, hidden=16, batch=128)


def examples(seed: int, num_examples: int = 2000) -> Examples:
    """Two heads with different curved log-odds; features far from 0 and of very different spread."""
    x_HNF = torch.randn(2, num_examples, 6, generator=torch.Generator().manual_seed(seed))
    y_HN = torch.stack((x_HNF[0, :, 0] + x_HNF[0, :, 1].abs() - 1, -3 * x_HNF[1, :, 2] - 2)).sigmoid()
    spread_F, level_F = torch.tensor([0.01, 1, 30, 1, 1, 1]), torch.tensor([0, 50, -200, 0, 0, 0])
    return Examples((x_HNF * spread_F + level_F).half(), y_HN)


def test_a_fit_predicts_examples_it_has_not_seen() -> None:
    fitted = evaluate(fit_layer(examples(0), LAYER, 0), examples(1), 0)
    started = evaluate(fit_layer(examples(0), TrainingConfig(steps=1, hidden=16, batch=128), 0), examples(1), 0)
    assert fitted.explained > 0.9 and fitted.rank > 0.9
    assert started.explained < 0.5


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = (fit_layer(examples(0), LAYER, 3) for _ in range(2))
    other = fit_layer(examples(0), TrainingConfig(steps=200, hidden=16, batch=128, seed=1), 3)
    assert all(a.equal(b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True))
    assert not first.inner_HFE.equal(other.inner_HFE)


def test_all_or_nothing_comes_before_always_little() -> None:
    """Odd examples score .5 or, as often, a millionth, even ones .1: means of .25 and .1, of the logs the reverse."""
    x_HNF = torch.tensor([-1.0, 1.0]).repeat(1000).view(1, 2000, 1).half()
    y_HN = torch.tensor([0.1, 0.5, 0.1, 1e-6]).repeat(500).unsqueeze(0)
    always, sometimes = fit_layer(Examples(x_HNF, y_HN), LAYER, 0)(x_HNF[:, :2].float()).sigmoid()[0].tolist()
    assert (always, sometimes) == (pytest.approx(0.1, abs=0.03), pytest.approx(0.25, abs=0.03))


def test_quality_is_that_of_the_definitions() -> None:
    """A predictor that always says log-odds 0, a share of .5: its variance explained is that of the mean, or less."""
    constant = LayerPredictor(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 2))
    x_HNF = torch.zeros(1, 4, 1).half()
    assert evaluate(constant, Examples(x_HNF, torch.tensor([[0.0, 1.0, 0.0, 1.0]])), 5).explained == pytest.approx(0)
    assert evaluate(constant, Examples(x_HNF, torch.tensor([[0.0, 0.5, 0.0, 0.5]])), 5).explained == pytest.approx(-1)
    assert evaluate(constant, Examples(x_HNF, torch.tensor([[0.0, 0.5, 0.0, 0.5]])), 5).layer == 5


def test_rank_correlation_worked_by_hand() -> None:
    """Ranks 1 2 3 4 5 against 2 1 4 3 5: squared distances sum up to 4, so 1 - 6 * 4 / (5 * 24)."""
    a_HN = torch.tensor([[10.0, 20.0, 30.0, 40.0, 1000.0]])
    b_HN = torch.tensor([[2.0, 1.0, 4.0, 3.0, 5.0]])
    assert spearman(a_HN, b_HN).tolist() == pytest.approx([0.8])
    assert spearman(a_HN, -a_HN).tolist() == pytest.approx([-1])
