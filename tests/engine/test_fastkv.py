"""`fastkv`: later layers run on chosen tokens, at their own positions, and the whole model when nobody is left behind.

R rows (KV heads)   S slots   D head dim
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import kvfold
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, PolicyError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.passes.prefill import PrefillPass
from kvfold.policy import Policy
from kvfold.score.base import Needs
from kvfold.store.store import check_reuse, kind_of
from kvfold.token_pruning import FastKV, at_new_tokens
from tests.engine.runs import Shared, kept, make_runner, make_sequence, prefill_and_generate
from tests.score.views import make_view
from tests.tiny import build, prompt

FAMILY = "llama"
LENGTH = 150


def layers_of(model: Model, policy: str, tokens: list[int], *, chunk_len: int = 64) -> list[list[list[int]]]:
    runner = make_runner(model, chunk_len)
    sequence = make_sequence(runner, policy)
    runner.prefill([sequence], [tokens])
    found = kept(sequence)
    sequence.release()
    return found


def test_later_layers_hold_the_tokens_that_went_on(shared: Shared) -> None:
    """The first layer holds everything; the others the same tokens in every head: the rate, with sinks and the end."""
    model = shared(FAMILY)
    first, *others = layers_of(model, "fastkv(rate=0.4, layer=0)", prompt(LENGTH))
    assert all(head == list(range(LENGTH)) for head in first)
    going = others[0][0]
    assert len(going) == 60 and others and all(head == going for layer in others for head in layer)
    assert going[:4] == [0, 1, 2, 3] and going[-32:] == list(range(LENGTH - 32, LENGTH))


def chosen_by_attention(model: Any, tokens: list[int], layers: slice, *, window: int, kernel: int) -> list[int]:
    """A fifth of the tokens: four sinks, the last 32, and what the window attends to most, by transformers' weights."""
    model.set_attn_implementation("eager")
    weights = model(torch.tensor([tokens]), output_attentions=True).attentions[layers]
    votes_T = sum(layer[0, :, -window:].sum((0, 1)) for layer in weights)
    before_T = functional.pad(votes_T[:-window], (kernel // 2, kernel // 2 + window)).unfold(0, kernel, 1).sum(-1)
    before_T[:4] = before_T[-32:] = torch.inf
    return sorted(before_T.topk(len(tokens) // 5).indices.tolist())


@torch.inference_mode()
@pytest.mark.parametrize(
    ("arguments", "layers"),
    [("voters=1", slice(1, 2)), ("voters=2", slice(0, 2)), ("", slice(0, 2)), ("kernel=7, voters=1", slice(1, 2))],
)
def test_the_end_and_the_last_layers_choose(shared: Shared, arguments: str, layers: slice) -> None:
    """Layers below the first cannot vote."""
    tokens, kernel = prompt(200), 7 if "kernel" in arguments else 33
    options = ", ".join(part for part in ("layer=1", "window=16", arguments) if part)
    going = layers_of(shared(FAMILY), f"fastkv({options})", tokens)[2][0]
    assert going == chosen_by_attention(build(FAMILY), tokens, layers, window=16, kernel=kernel)


def test_votes_are_of_the_new_tokens_alone() -> None:
    """Rows that stored more or less of an earlier prompt: the new slots are the last of each row."""
    view = make_view((9,), (7, 5), Needs())
    value_RS = torch.arange(14).view(2, 7)
    assert at_new_tokens(value_RS, view, 3).tolist() == [[4, 5, 6], [9, 10, 11]]


def expected_logits(model: Model, tokens: list[int], going: list[int], layer: int) -> Tensor:
    """Transformers' own modules: all tokens up to `layer`, then these, with a plain causal mask among them."""
    base = model.hf.base_model
    ids, position = torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0)
    hidden = base.embed_tokens(ids)
    for i, block in enumerate(base.layers):
        turns = base.rotary_emb(hidden, position)
        allowed = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
        out = block(hidden, attention_mask=mask, position_ids=position, position_embeddings=turns)
        hidden = out[0] if isinstance(out, tuple) else out
        if i == layer:
            hidden, position = hidden[:, going], position[:, going]
    logits: Tensor = model.hf.lm_head(base.norm(hidden))[0, -1]
    return logits


@torch.inference_mode()
@pytest.mark.parametrize("chunk_len", [16, 512])
def test_the_result_is_that_of_the_plain_modules(shared: Shared, chunk_len: int) -> None:
    model, tokens = shared(FAMILY), prompt(LENGTH)
    runner = make_runner(model, chunk_len)
    sequence = make_sequence(runner, "fastkv(rate=0.3, layer=0)")
    found = runner.prefill([sequence], [tokens])[0]
    going = sequence.positions(1, 0).tolist()
    sequence.release()
    expected = expected_logits(model, tokens, going, 0)
    whole = expected_logits(model, tokens, list(range(LENGTH)), 0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert len(going) == 45 and not torch.allclose(whole, expected, atol=1e-2)


@pytest.mark.parametrize("policy", ["full", "snapkv(window=8) + 2x + protect(sinks=2, recent=8)"])
def test_nobody_left_behind_is_dense(shared: Shared, policy: str) -> None:
    model, tokens = shared(FAMILY), prompt(LENGTH)
    dense, every = prefill_and_generate(model, [policy, f"{policy} + fastkv(rate=1.0, layer=0)"], [tokens, tokens])
    assert dense == every


def test_a_mixed_batch_gives_what_single_runs_give(shared: Shared) -> None:
    model = shared(FAMILY)
    last = model.spec.num_layers - 2
    size = "snapkv(window=8) + 3x + protect(sinks=2, recent=8)"
    policies = ["full", f"{size} + fastkv(rate=0.3, layer=0)", f"h2o + 2x + fastkv(rate=0.5, layer={last})", size]
    prompts = [prompt(length, seed=length) for length in (90, LENGTH, 120, 110)]
    together = prefill_and_generate(model, policies, prompts, chunk_len=64)
    for policy, tokens, found in zip(policies, prompts, together, strict=True):
        assert [found] == prefill_and_generate(model, [policy], [tokens], chunk_len=64)


def test_sizes_hold_beside_it(shared: Shared) -> None:
    """A third of 150 tokens is 50 slots a head, open block included; layers that run on fewer tokens hold these."""
    model, size = shared(FAMILY), "snapkv(window=8) + 3x + protect(sinks=2, recent=8)"
    wide = layers_of(model, f"{size} + fastkv(rate=0.5, layer=0)", prompt(LENGTH))
    narrow = layers_of(model, f"{size} + fastkv(rate=0.2, layer=0, window=8)", prompt(LENGTH))
    assert {len(head) for layer in wide for head in layer} == {42}
    assert [{len(head) for head in layer} for layer in narrow] == [{42}] + [{30}] * (len(narrow) - 1)


def test_pinned_tokens_go_on_and_questions_run_whole(shared: Shared) -> None:
    model = shared(FAMILY)
    with kvfold.Session(model, "fastkv(rate=0.3, layer=0)", template=None) as session:
        before = session.extend(prompt(LENGTH)).kept(1, 0)
        assert len(before) == 45
        session.extend(prompt(50, seed=4), compress=False)
        assert session.kept(1, 0) == before + list(range(LENGTH, LENGTH + 50))
    with kvfold.Session(model, "fastkv(rate=0.3, layer=0)", template=None) as session:
        session.extend(prompt(LENGTH), pin=True)
        assert session.kept(1, 0) == list(range(LENGTH))


def test_progress_counts_every_token(shared: Shared) -> None:
    model, done = shared(FAMILY), list[int]()
    runner = make_runner(model, 32)
    sequence = make_sequence(runner, "fastkv(rate=0.2, layer=0)")
    runner.prefill([sequence], [prompt(LENGTH)], progress=done.append)
    sequence.release()
    assert sum(done) == LENGTH


def test_read_in_one_pass_with_others_it_stays_itself(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for those that leave nobody behind, one for each way of leaving tokens behind."""
    model, tokens, passes = shared(FAMILY), prompt(LENGTH), list[int]()
    runner: Runner = make_runner(model)
    read = runner.run_pass

    def counted(current: PrefillPass, *args: Any, **more: Any) -> Tensor:
        passes.append(1 + len(current.followers))
        return read(current, *args, **more)

    monkeypatch.setattr(runner, "run_pass", counted)
    snap, some = "snapkv(window=8)", "protect(sinks=2, recent=8)"
    short = "fastkv(rate=0.3, layer=0, window=8)"
    policies = [
        "full",
        f"{snap} + 2x + {some} + {short}",
        f"{snap} + 2x + {some}",
        f"{snap} + 5x + {some} + {short}",
        f"{snap} + ada + 4x + {some} + {short}",
        f"{snap} + 5x + protect(sinks=2, recent=16) + {short}",
        f"snapkv(window=12) + 5x + {some} + {short}",
    ]
    sequences = [make_sequence(runner, policy) for policy in policies]
    logits = runner.prefill_many(sequences, tokens)
    assert passes == [2, 3, 1, 1] and torch.equal(logits[1], logits[4]) and not torch.equal(logits[0], logits[1])
    assert [kept(sequence) for sequence in sequences] == [layers_of(model, p, tokens, chunk_len=512) for p in policies]
    for sequence in sequences:
        sequence.release()


@pytest.mark.parametrize(("num_layers", "layer"), [(32, 15), (36, 17), (40, 19)])
def test_the_default_layer_is_the_published_one(num_layers: int, layer: int) -> None:
    assert FastKV().last_full_layer(num_layers) == layer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streaming + 512tok + between_chunks + fastkv", "not there yet between_chunks"),
        ("kvzip + 8x + fastkv", "looks at queries of all of them"),
        ("expected + 8x + fastkv", "looks at queries of all of them"),
        ("streaming + 8x + slot + fastkv", "use keep"),
        ("fastkv(rate=0.0)", "above 0 and at most 1"),
        ("fastkv(kernel=4)", "kernel must be odd"),
        ("fastkv(voters=0)", "layers that choose, at least 1"),
        ("prefill(snapkv + 8x + fastkv)", "cannot stand inside prefill"),
    ],
)
def test_what_cannot_work_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.parse(text)


def test_models_it_does_not_fit_are_refused(shared: Shared) -> None:
    model = shared(FAMILY)
    with pytest.raises(PolicyError, match="before the last"):
        check_policy(Policy.parse(f"fastkv(layer={model.spec.num_layers - 1})"), model.spec)
    with pytest.raises(PolicyError, match="prunes tokens between layers"):
        kvfold.Cache(model.hf, "fastkv(layer=0)")
    policy = Policy.parse("fastkv(layer=0)")
    assert kind_of(policy, model.spec) == "snapshots"
    with pytest.raises(PolicyError, match="to reuse prefixes, use dense"):
        check_reuse(policy, model.spec)
    runner = make_runner(model)
    sequence = make_sequence(runner, "fastkv(layer=0)")
    with pytest.raises(InputError, match="no log-probabilities"):
        runner.logprobs(sequence, prompt(20))
    sequence.release()


def test_the_canonical_form_says_how_prompts_run() -> None:
    policy = Policy.parse("snapkv + 8x + fastkv(rate=0.25)")
    assert str(policy).endswith("fastkv(rate=0.25, layer=none, window=32, kernel=33, voters=4)")
    assert Policy.parse(str(policy)) == policy and Policy.parse(policy.short) == policy
    assert str(Policy.parse("full")).endswith("+ dense")
