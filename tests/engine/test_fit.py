"""Fitted caches through whole prompts: the queries asked, biases in every reader, batches, further reading, bytes.

H KV heads   G query heads per KV head   N queries of a head   T tokens   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvfold.attend.lse_merge import LseMerge
from kvfold.attend.paged import merge_paged
from kvfold.engine.runner import Runner
from kvfold.errors import ModelError
from kvfold.evicted import CalibrationTargets, Fit, KeptSlots, Refit
from kvfold.models.attach import attach
from kvfold.models.loader import Model
from kvfold.models.repeat_prompt import question_ids, repeat_request
from kvfold.pages.arena import Arena
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from tests.engine.runs import make_runner, make_sequence, prefill_and_generate
from tests.tiny import build, prompt

LENGTH = 150
FITTED = "kvzip(chunk=64) + global + 3x + fit(tokens=50)"


@contextmanager
def fits() -> Iterator[list[tuple[CalibrationTargets, KeptSlots, Refit]]]:
    """What was fitted, head by head."""
    seen: list[tuple[CalibrationTargets, KeptSlots, Refit]] = []
    refit = Fit.refit

    def watching(self: Fit, targets: CalibrationTargets, heads: Sequence[KeptSlots]) -> list[Refit]:
        found = refit(self, targets, heads)
        seen.extend((targets.of([i]), heads[i], found[i]) for i in range(len(heads)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fit, "refit", watching)
        yield seen


def read(model: Model, policy: str, *prompts: Sequence[int], chunk_len: int = 40) -> SequenceCache:
    runner = make_runner(model, chunk_len)
    sequence = make_sequence(runner, policy)
    for ids in prompts:
        runner.prefill([sequence], [ids])
    return sequence


def biases(sequence: SequenceCache) -> list[Tensor]:
    layers = range(sequence.spec.num_layers)
    return [bias for layer in layers for bias in stored_slots(sequence, layer, torch.float32).bias]


def values(sequence: SequenceCache) -> list[Tensor]:
    layers = range(sequence.spec.num_layers)
    return [v_SD for layer in layers for v_SD in stored_slots(sequence, layer, torch.float32).v]


@torch.inference_mode()
def first_layer(ids: Sequence[int], start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [Q, T, D], keys and values [H, T, D] of the unmodified model's layer 0, from position `start` on."""
    hf = build("llama").model
    hidden = hf.embed_tokens(torch.tensor([list(ids)]))
    cos, sin = hf.rotary_emb(hidden, torch.arange(start, start + len(ids)).unsqueeze(0))
    attention, normed = hf.layers[0].self_attn, hf.layers[0].input_layernorm(hidden)
    sides = (attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed))
    q_1QTD, k_1HTD, v_1HTD = (side.unflatten(-1, (-1, 16)).transpose(1, 2) for side in sides)
    q_1QTD, k_1HTD = apply_rotary_pos_emb(q_1QTD, k_1HTD, cos, sin)
    return q_1QTD[0], k_1HTD[0], v_1HTD[0]


def answered(q_QTD: Tensor, held_HSD: Tensor, v_HSD: Tensor, own_HTD: Tensor) -> Tensor:
    """[Q, T, D + 2]: what the slots held give, their log-sum-exp, and their share where the rest of a query's attention
    goes to the keys of its own reading up to itself."""
    k_QSD, v_QSD, own_QTD = (x.repeat_interleave(2, dim=0) for x in (held_HSD, v_HSD, own_HTD))
    num_held = v_QSD.shape[1]
    score_QTS = q_QTD @ torch.cat((k_QSD, own_QTD), dim=1).mT / 4
    score_QTS[..., num_held:].masked_fill_(torch.ones_like(score_QTS[0, :, num_held:]).triu(1).bool(), -torch.inf)
    held_QTS = score_QTS[..., :num_held]
    share_QT1 = score_QTS.softmax(-1)[..., :num_held].sum(-1, keepdim=True)
    return torch.cat((held_QTS.softmax(-1) @ v_QSD, held_QTS.logsumexp(-1, keepdim=True), share_QT1), dim=-1)


@pytest.mark.parametrize("tokens", [50, LENGTH, 1000])
def test_replay_queries_are_those_of_evenly_spaced_tokens_with_their_answers(model: Model, tokens: int) -> None:
    ids = prompt(LENGTH)
    with fits() as seen:
        read(model, f"kvzip(chunk=64) + 3x + fit(tokens={tokens})", ids).release()
    count = min(tokens, LENGTH)
    wanted = [i * LENGTH // count for i in range(count)]
    expected, (_, held_HSD, v_HSD) = [], first_layer(ids, 0)
    for begin in range(0, LENGTH, 64):
        request = repeat_request(model.hf).before(ids[:begin])
        q_QTD, k_HTD, _ = first_layer([*request, *ids[begin : begin + 64]], LENGTH)
        mine = [i - begin + len(request) for i in wanted if begin <= i < begin + 64]
        expected.append(torch.cat((q_QTD, answered(q_QTD, held_HSD, v_HSD, k_HTD)), dim=-1)[:, mine])
    expected_HNX = torch.cat(expected, dim=1).unflatten(0, (2, 2)).flatten(1, 2)
    assert len(seen) == 6 and float(expected_HNX[..., -1].min()) < 0.9
    for head in range(2):
        targets = seen[head][0]
        columns = (targets.q_HND, targets.out_HND, targets.lse_HN.unsqueeze(-1), targets.share_HN.unsqueeze(-1))
        torch.testing.assert_close(torch.cat(columns, dim=-1)[0], expected_HNX[head], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def greedy(model: Model, ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the unmodified model says next, up to an end token."""
    hf, found = build(model.name), list[int]()
    while len(found) < num_tokens and not (found and found[-1] in model.spec.eos_token_ids):
        found.append(int(hf(torch.tensor([[*ids, *found]])).logits[0, -1].argmax()))
    return found


def test_self_study_asks_what_the_model_answers_to_questions(model: Model) -> None:
    ids, questions = prompt(LENGTH), question_ids(model.hf)
    end = greedy(model, [*ids, *questions[0]], 3)[-1]  # so that answers are of different lengths
    model = replace(model, spec=replace(model.spec, eos_token_ids=frozenset({end})))
    with fits() as seen:
        for queries in ("replay", "study"):
            read(model, f"kvzip(chunk=64) + 3x + fit({queries}, tokens=50)", ids).release()
    replayed, targets = seen[0][0], seen[6][0]
    _, held_HSD, v_HSD = first_layer(ids, 0)
    parts: dict[tuple[int, int], Tensor] = {}  # by turn and question: those of a turn are read at once
    for index, question in enumerate(questions):
        answer = greedy(model, [*ids, *question], 96)
        q_QTD, k_HTD, _ = first_layer([*question, *answer[:-1]], LENGTH)
        found_QTX = torch.cat((q_QTD, answered(q_QTD, held_HSD, v_HSD, k_HTD)), dim=-1)
        lengths = [len(question), *([1] * (len(answer) - 1))]
        parts |= {(turn, index): part for turn, part in enumerate(found_QTX.split(lengths, dim=1))}
    expected_HNX = torch.cat([parts[key] for key in sorted(parts)], dim=1).unflatten(0, (2, 2))[0].flatten(0, 1)
    columns = (targets.q_HND, targets.out_HND, targets.lse_HN.unsqueeze(-1), targets.share_HN.unsqueeze(-1))
    mine_NX = torch.cat(columns, dim=-1)[0, replayed.q_HND.shape[1] :]
    torch.testing.assert_close(mine_NX, expected_HNX, atol=1e-4, rtol=1e-4)


def test_self_study_needs_words() -> None:
    hf = build()
    runner = Runner(hf, attach(hf).spec, Arena(2**20, superblock_bytes=4096))
    sequence = runner.new_sequence(Policy.parse("knorm + 3x + fit(study) + protect(recent=0)"))
    with pytest.raises(ModelError, match="its tokenizer is not known"):
        runner.prefill([sequence], [prompt(LENGTH)])
    assert sequence.committed_len == 0


def test_prompt_queries_are_the_last_and_see_what_was_before_them(model: Model) -> None:
    ids = prompt(LENGTH)
    with fits() as seen:
        read(model, "knorm + 3x + fit(prompt, tokens=30)", ids).release()
    expected_QTD, _, _ = first_layer(ids[-30:], LENGTH - 30)
    targets = seen[0][0]
    torch.testing.assert_close(targets.q_HND[0], expected_QTD[:2].flatten(0, 1), atol=1e-4, rtol=1e-4)
    assert targets.position_N is not None and targets.position_N.tolist() == [*range(120, 150)] * 2
    assert bool((targets.share_HN == 1.0).all())


@pytest.mark.parametrize("policy", [FITTED, "knorm + 3x + fit(prompt, tokens=60)", f"{FITTED} + int8"])
def test_what_is_stored_answers_as_it_was_fitted(model: Model, policy: str) -> None:
    """The reader honours biases: over the pages, queries get the fitted outputs and log-sum-exps."""
    with fits() as seen:
        sequence = read(model, policy, prompt(LENGTH))
    assert len(seen) == 6
    for index, (targets, slots, found) in enumerate(seen):
        layer, head = divmod(index, 2)
        score_NS = targets.q_HND[0] @ slots.k_SD.T * targets.scale + found.bias_S
        merge = LseMerge(targets.q_HND[0].expand(2, 1, -1, -1))
        merge_paged(merge, sequence, layer, targets.q_HND[0].expand(2, 1, -1, -1), LENGTH)
        assert merge.lse_HGT is not None
        near = 0.05 if "int8" in policy else 1e-4
        torch.testing.assert_close(merge.lse_HGT[head, 0], score_NS.logsumexp(-1), atol=near, rtol=near)
        torch.testing.assert_close(merge.result()[head, 0], score_NS.softmax(-1) @ found.v_SD, atol=near, rtol=near)
    assert any(bias.abs().max() > 0.1 for bias in biases(sequence))
    sequence.release()


def test_fitted_heads_are_nearer_to_the_whole_cache(model: Model) -> None:
    with fits() as seen:
        read(model, FITTED, prompt(LENGTH)).release()
    for targets, slots, found in seen:
        score_NS = targets.q_HND[0] @ slots.k_SD.T * targets.scale
        dropped, fitted = score_NS.softmax(-1) @ slots.v_SD, (score_NS + found.bias_S).softmax(-1) @ found.v_SD
        assert (fitted - targets.out_HND[0]).norm() < (dropped - targets.out_HND[0]).norm()
        mass_N, fitted_N = score_NS.logsumexp(-1), (score_NS + found.bias_S).logsumexp(-1)
        assert (fitted_N - targets.lse_HN[0]).exp().sub(1).norm() < (mass_N - targets.lse_HN[0]).exp().sub(1).norm()


def test_keys_and_choice_are_those_of_dropping(model: Model) -> None:
    dropped, fitted = (
        read(model, "kvzip + global + 3x", prompt(LENGTH)),
        read(model, FITTED.replace("(chunk=64)", ""), prompt(LENGTH)),
    )
    for layer in range(3):
        a, b = (stored_slots(sequence, layer, torch.float32) for sequence in (dropped, fitted))
        for mine, theirs in zip((*a.k, *a.position), (*b.k, *b.position), strict=True):
            assert mine.equal(theirs)
    dropped.release()
    fitted.release()


@pytest.mark.parametrize(
    "policy",
    [
        FITTED,
        "keydiff + ada + 3x + fit(prompt, tokens=40)",
        f"{FITTED} + int4",
    ],
)
def test_reading_on_leaves_what_is_sealed(model: Model, policy: str) -> None:
    """Slots that survive a second prompt keep values and biases; new ones get theirs."""
    runner = make_runner(model)
    sequence = make_sequence(runner, policy)
    runner.prefill([sequence], [prompt(LENGTH)])
    before = [stored_slots(sequence, layer, torch.float32) for layer in range(3)]
    runner.prefill([sequence], [prompt(LENGTH, seed=2)])
    for layer, old in enumerate(before):
        now = stored_slots(sequence, layer, torch.float32)
        for head in range(2):
            slot_of = {position: slot for slot, position in enumerate(old.position[head].tolist())}
            survived = [(slot_of[p], slot) for slot, p in enumerate(now.position[head].tolist()) if p < LENGTH]
            was, is_now = map(list, zip(*survived, strict=True))
            assert now.v[head][is_now].equal(old.v[head][was]) and now.bias[head][is_now].equal(old.bias[head][was])
            assert now.bias[head][len(survived) :].abs().max() > 0
    sequence.release()


def test_one_prefill_serves_fitted_and_other_policies(model: Model) -> None:
    policies = [
        FITTED,
        "kvzip(chunk=64) + global + 3x",
        "kvzip(chunk=64) + global + 3x + fit(tokens=20)",
        "keydiff + 3x + fit(tokens=50)",
        "keydiff + 3x + fit(prompt, tokens=50) + int4",
        "tova + 3x",
    ]
    runner, ids = make_runner(model, 40), prompt(LENGTH)
    together = [make_sequence(runner, policy) for policy in policies]
    alone = [make_sequence(runner, policy) for policy in policies]
    runner.prefill_many(together, ids)
    for mine, theirs in zip(together, alone, strict=True):
        runner.prefill([theirs], [ids])
        torch.testing.assert_close(biases(mine), biases(theirs))
        torch.testing.assert_close(values(mine), values(theirs))
    for sequence in (*together, *alone):
        sequence.release()


def test_a_ragged_batch_is_single_runs(model: Model) -> None:
    policies = [FITTED, "keydiff + ada + 2x + fit + int4", "full", "prefill(knorm + 60tok + fit(prompt))"]
    prompts = [prompt(140 + 9 * i, seed=i) for i in range(4)]
    alone = [prefill_and_generate(model, [policy], [ids])[0] for policy, ids in zip(policies, prompts, strict=True)]
    assert prefill_and_generate(model, policies, prompts, chunk_len=48) == alone
