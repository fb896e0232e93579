"""Sizes are bounds: every budget with every codec, of all layers or of some, holds no more than asked, or is refused.

Lengths, sizes, scores, page sizes and open blocks are drawn with a seed of each combination.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvfold.budget.profile import HeadProfile
from kvfold.compression.round import check_size
from kvfold.compression.view import size_facts
from kvfold.core import ModelSpec
from kvfold.errors import KvfoldError, PolicyError, SizeError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms
from kvfold.session import Session
from kvfold.stats import Stats
from tests.codec.bases import random_bases
from tests.tiny import prompt

Policy.parse("full")  # loads the variants
BUDGETS = [term.name for term in terms("budget")]
CODECS = [term.name for term in terms("codec")]
SCORES = ["keydiff", "h2o", "streaming(sinks=12)", "lagkv(cross=true, lag=16)", "snapkv(window=8)", "knorm"]
SMALL = "protect(sinks=2, recent=4)"
FIXED = "after_prefill + never"  # where slots cannot be moved


@pytest.fixture
def files(model: Model, tmp_path: Path) -> dict[str, str]:
    """Terms that want a file, with one."""
    heads, bases = tmp_path / "heads.json", tmp_path / "bases"
    num_heads = model.spec.layers[0].num_kv_heads
    needs = [tuple((1 + head) / 2 ** (2 * i + 1) for head in range(num_heads)) for i in range(model.spec.num_layers)]
    HeadProfile(model.name, model.weights_digest, "by hand", tuple(needs)).write(heads)
    random_bases(model.spec, 1).write(bases)
    return {
        "profile": f'profile(file="{heads}")',
        "palu": f'palu("{bases}", rank=0.5)',
    }


def codec_text(name: str, draw: random.Random, files: dict[str, str]) -> str:
    """Of all layers, of some, or of one side alone."""
    text = files.get(name, name)
    if name in ("native", "minicache") or draw.random() < 0.3:
        return text
    layers = draw.choice(["layers=:1", "layers=1:", "layers=:2", "layers=2:"])
    return text.replace(")", f", {layers})") if ")" in text else f"{text}({layers})"


def size_text(kind: str, draw: random.Random, full_bytes: int) -> str:
    if kind == "tokens":
        return f"{draw.randint(24, 90)}tok"
    if kind == "bytes":
        return f"{int(full_bytes * draw.uniform(0.4, 0.8))}B"
    return f"{draw.randint(35, 70)}%mem" if kind == "memory" else f"{draw.choice([1.5, 2, 3, 4])}x"


def full_bytes_of(spec: ModelSpec, length: int) -> int:
    return sum(length * spec.layers[i].num_kv_heads * spec.layers[i].head_dim * 4 for i in spec.compressible_layers)


def check(session: Session, kind: str, size: str, stats: Stats) -> None:
    if kind == "tokens":
        assert stats.mean_slots <= int(size.removesuffix("tok"))
    elif kind == "bytes":
        assert stats.resident_bytes <= int(size.removesuffix("B"))
    elif kind == "memory":
        full_bytes = size_facts(session.cache, len(session.token_ids)).full_bytes
        assert stats.resident_bytes <= int(size.removesuffix("%mem")) * full_bytes / 100
    else:
        assert stats.mean_slots <= -(-len(session.token_ids) // float(size.removesuffix("x")))


def extended(session: Session, tokens: list[int]) -> Stats:
    """SizeError where a relative size would leave the prompt whole."""
    check_size(session.cache, len(session.token_ids) + len(tokens))
    return session.extend(tokens).stats()


def hold(model: Model, budget: str, codec: str, kind: str, files: dict[str, str], turn: int) -> bool:
    """Whether a drawn policy was run to its end, rather than refused with a reason."""
    draw = random.Random(f"{budget} {codec} {kind} {turn}")
    length, score = draw.randint(120, 260), draw.choice(SCORES)
    size = size_text(kind, draw, full_bytes_of(model.spec, length))
    text = f"{score} + {files.get(budget, budget)} + {size} + {codec_text(codec, draw, files)} + {SMALL}"
    page_size, open_len = draw.choice([(4, 8), (16, 4), (1, 1), (3, 8)])
    try:
        policy = Policy.parse(text)
    except PolicyError:
        try:
            policy = Policy.parse(f"{text} + {FIXED}")
        except PolicyError as error:
            assert str(error)
            return False
    with Session(model, policy, template=None, page_size=page_size, open_len=open_len, chunk_len=50) as session:
        try:
            check(session, kind, size, extended(session, prompt(length, seed=turn)))
            if kind in ("tokens", "bytes") and policy.decode.may_evict:
                session.generate(max_new_tokens=12)
                check(session, kind, size, session.stats())
            check(session, kind, size, extended(session, prompt(40, seed=turn + 100)))
        except SizeError as error:
            assert "smallest possible" in str(error)
            return False
        except KvfoldError as error:  # such as codes that cannot move
            assert codec.startswith("kivi"), error
            return False
    return True


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_size_is_exceeded(model: Model, files: dict[str, str], budget: str) -> None:
    others = random.Random(budget)
    drawn = [(codec, kind) for codec in CODECS for kind in ("bytes", others.choice(["tokens", "memory", "ratio"]))]
    ran = [hold(model, budget, codec, kind, files, turn=1) for codec, kind in drawn]
    assert sum(ran) > len(ran) // 3


@pytest.mark.parametrize("budget", BUDGETS)
def test_layers_whose_slots_differ_in_bytes(model: Model, files: dict[str, str], budget: str) -> None:
    """Many draws of the one codec whose slots are far smaller than those of the layers without it."""
    ran = [hold(model, budget, "int2", "bytes", files, turn) for turn in range(2, 8)]
    assert any(ran)  # scores are drawn too, and some need more than the size has


@pytest.mark.parametrize(
    "policy",
    [
        "streaming(sinks=60)",
        "expected(sinks=60) + never",
        "kvzip(sinks=60) + never",
        "kvzip_plus(sinks=60) + never",
        "lagkv(sinks=60)",
        "tree(sinks=60)",
        "compactor(sinks=30, recent=30)",
        "chunk(streaming(sinks=60))",
        "critical(lagkv(sinks=60))",
    ],
)
def test_what_a_score_always_keeps_is_inside_the_size(model: Model, policy: str) -> None:
    too_small = Session(model, f"{policy} + {SMALL} + 60tok", template=None, page_size=4, open_len=8)
    with too_small as session, pytest.raises(SizeError, match=r"the smallest possible is (68|72)tok"):
        session.extend(prompt(200))
    with Session(model, f"{policy} + {SMALL} + 72tok", template=None, page_size=4, open_len=8) as session:
        assert session.extend(prompt(200)).stats().mean_slots <= 72
