"""`protect(recent=50%)`: a share of the slots a head keeps, which is how H2O splits its budget.

H KV heads   G query heads per KV head   T tokens
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.errors import PolicyError, SizeError
from kvfold.models.cache import Cache
from kvfold.models.loader import Model
from kvfold.policy import Policy
from kvfold.policy.describe import explain
from kvfold.policy.size import Floor, Percent
from kvfold.protect import Protect
from tests.engine.runs import kept, make_runner, make_sequence
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, stored_tokens, tiny_spec
from tests.tiny import prompt

H2O = "h2o + protect(sinks=0, recent=50%)"


def heavy_and_recent(q_QTD: Tensor, k_HTD: Tensor, scale: float, head: int, heavy: int, recent: int) -> list[int]:
    """Algorithm 1 of H2O at the end of a prompt: the last `recent` tokens, and of the others the `heavy` with most
    attention, summed over all queries (and here over the group that shares the keys)."""
    num_tokens, group = k_HTD.shape[1], len(q_QTD) // len(k_HTD)
    total = [0.0] * num_tokens
    for q_TD in q_QTD[head * group : (head + 1) * group]:
        for t in range(num_tokens):
            weight = torch.softmax(k_HTD[head, : t + 1] @ q_TD[t] * scale, dim=0)
            total = [a + b for a, b in zip(total, [*weight.tolist(), *([0.0] * num_tokens)], strict=False)]
    older = sorted(range(num_tokens - recent), key=lambda t: -total[t])[:heavy]
    return sorted(older + list(range(num_tokens - recent, num_tokens)))


@pytest.mark.parametrize(("slots", "recent"), [(20, 10), (21, 10), (40, 20)])
def test_h2o_spends_half_of_its_budget_on_recent_tokens(slots: int, recent: int) -> None:
    """4 of the size are the open block's; of the rest, half is recent, rounded down."""
    spec = tiny_spec(num_layers=1)
    layers = random_layers(spec, 64)
    sequence = new_sequence(f"{H2O} + {slots + 4}tok", spec)
    prefill(sequence, layers)
    (q, k, _), scale = layers[0], spec.layers[0].scale
    for head in range(2):
        assert stored_tokens(sequence, 0, head) == heavy_and_recent(q, k, scale, head, slots - recent, recent)


def test_the_share_is_of_what_each_size_leaves() -> None:
    spec = tiny_spec(num_layers=1)
    layers = random_layers(spec, 120)
    for size, recent in (("2x", 28), ("4x", 13), ("50tok", 23)):
        sequence = new_sequence(f"knorm + protect(sinks=0, recent=50%) + {size}", spec)
        prefill(sequence, layers)
        for head in range(2):
            stays = stored_tokens(sequence, 0, head)
            assert set(range(120 - recent, 120)) <= set(stays)


def test_a_bound_keeps_its_share_while_decoding() -> None:
    spec = tiny_spec(num_layers=1)
    layers = random_layers(spec, 90)
    sequence = new_sequence(f"{H2O} + 24tok", spec)
    prefill(sequence, [(q[:, :60], k[:, :60], v[:, :60]) for q, k, v in layers])
    for at in range(60, 90):
        decode(sequence, layers, at)
        assert sequence.stored_lens(0)[0] + sequence.open.fill <= 24
        sealed = sequence.sealed_len
        assert set(range(sealed - 10, sealed)) <= set(stored_tokens(sequence, 0, 0))


@pytest.mark.parametrize(
    ("protect", "window", "smallest"),
    [
        (Protect(0, Percent(50.0)), 0, 0),
        (Protect(4, Percent(50.0)), 0, 7),  # 7 - floor(3.5) = 4, and 6 - 3 = 3
        (Protect(4, Percent(50.0)), 8, 12),
        (Protect(1, Percent(99.0)), 0, 1),
        (Protect(3, Percent(90.0)), 0, 21),  # ceil(21 / 10) = 3
        (Protect(0, Percent(100.0)), 5, 5),
        (Protect(4, 32), 8, 36),
    ],
)
def test_the_floor_is_the_smallest_size_that_holds_what_is_protected(
    protect: Protect, window: int, smallest: int
) -> None:
    """Sinks, the score's window, and the share of that very size."""
    fits = [
        slots
        for slots in range(200)
        if isinstance(recent := protect.at(slots).recent, int) and protect.sinks + max(recent, window) <= slots
    ]
    assert protect.floor(window, 32).slots == smallest + 32 == fits[0] + 32
    assert fits == list(range(smallest, 200))


def test_a_size_below_the_floor_names_one_that_works() -> None:
    spec = tiny_spec(num_layers=1)
    layers = random_layers(spec, 64)
    with pytest.raises(SizeError, match=r"4 sinks, 50% recent, open block 4\); the smallest possible is 11tok"):
        prefill(new_sequence("knorm + protect(recent=50%) + 10tok", spec), layers)
    sequence = new_sequence("knorm + protect(recent=50%) + 11tok", spec)
    prefill(sequence, layers)
    assert stored_tokens(sequence, 0, 0) == [0, 1, 2, 3, 61, 62, 63]
    assert str(Floor(4, 8, 32, Percent(50.0))) == "4 sinks, 8 or 50% recent, open block 32"


@pytest.mark.parametrize("text", ["50%", "12.5%", "100%"])
def test_the_share_is_part_of_the_language(text: str) -> None:
    policy = Policy.parse(f"h2o + 8x + protect(sinks=0, recent={text})")
    assert policy.prefill.protect == Protect(0, Percent(float(text.rstrip("%"))))
    assert f"protect(sinks=0, recent={text})" in str(policy)
    assert f"protect(sinks=0, recent={text})" in policy.short
    assert f"recent={text}" in explain(policy)["prefill"]
    for again in (str(policy), policy.short, f"h2o+8x+protect(0,{text.replace('%', ' %')})"):
        assert Policy.parse(again).fingerprint == policy.fingerprint
    other = Policy.parse("h2o + 8x + protect(sinks=0, recent=49%)")
    assert other.fingerprint != policy.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h2o + 8x + protect(recent=0%)", "recent is a share above 0% and at most 100%, not 0%"),
        ("h2o + 8x + protect(recent=101%)", "at most 100%, not 101%"),
        ("h2o + 8x + protect(recent=-5%)", "above 0%"),
        ("h2o + 8x + protect(recent=100%)", "recent=100% leaves no slot for sinks=4"),
        ("h2o + 8x + protect(sinks=50%)", "sinks takes a whole number, not 50%"),
        ("h2o + 8x + protect(recent=half)", "recent takes a whole number or a share like 50%, not half"),
        ("snapkv(window=50%) + 8x", "window takes a whole number, not 50%"),
        ("h2o + 50%", '"50%" is no size'),
    ],
)
def test_what_makes_no_share_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Policy.parse(text)


def test_policies_that_share_a_prefill_keep_what_they_keep_alone(model: Model) -> None:
    """Shares of different sizes protect different tokens, also of those that fastkv lets go on."""
    runner, ids = make_runner(model), prompt(150)
    policies = [
        *(f"{H2O} + {size}" for size in ("2x", "3x")),
        *(f"snapkv(window=8) + protect(recent=60%) + fastkv(rate=0.3, window=8) + {size}" for size in ("2x", "3x")),
    ]
    together, alone = ([make_sequence(runner, policy) for policy in policies] for _ in range(2))
    try:
        runner.prefill_many(together, ids)
        for sequence in alone:
            runner.prefill([sequence], [ids])
        assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
    finally:
        for sequence in (*together, *alone):
            sequence.release()


def test_the_drop_in_cache_takes_a_share(model: Model) -> None:
    ids = torch.tensor([prompt(150)])
    cache = Cache(model.hf, f"{H2O} + 2x")
    model.hf.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    (sequence,) = cache.sequences
    recent = (75 - sequence.config.open_len) // 2
    assert set(range(150 - recent, 150)) <= set(sequence.positions(0, 0).tolist())
    cache.reset()
