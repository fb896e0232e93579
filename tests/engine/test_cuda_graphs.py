"""Graphs that were really captured agree with the plain pass, for every kind of layout: on a GPU, on a tiny model."""

from __future__ import annotations

import pytest
import torch

from kvfold.engine.cuda_graphs import CudaGraphs
from kvfold.models.loader import Model
from tests.engine.runs import make_runner, make_sequence
from tests.passes.captured.test_step import same_block, same_observations
from tests.tiny import prompt, ready

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
PROTECT = "protect(sinks=2, recent=4)"
POLICIES = (
    "full",
    "streaming + 64tok + slot",
    f"streaming(sinks=3) + 64tok + slot + int8 + {PROTECT}",
    "keydiff + 10x + slot + protect(none)",
    f"h2o + 64tok + {PROTECT}",
    f"h2o + ada + 64tok + int8 + {PROTECT}",
    "tova + 64tok",
    f"snapkv(window=4) + 64tok + {PROTECT}",
    "prefill(streaming + 64tok) + decode(h2o + 64tok + protect(recent=48)) + slot",
)


@pytest.fixture(scope="module")
def model() -> Model:
    return ready(device="cuda")


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_steps_agree_with_plain_ones(model: Model, policy: str) -> None:
    runner, captured = make_runner(model), make_runner(model)
    runner.graphs, captured.graphs = None, CudaGraphs()
    captured.graphs.compile = False
    plain, fast = ([make_sequence(runner, policy, page_size=16, open_len=8) for _ in range(3)] for _ in range(2))
    for sequences in (plain, fast):
        runner.prefill(sequences, [prompt(length, seed=length) for length in (90, 200, 131)])
    for token in range(40):  # blocks of 8 seal five times
        batch = slice(0, 3 if token % 3 else 2)  # lanes are left and taken again
        ids = [token, token + 1, token + 2][batch]
        expected = runner.decode(plain[batch], ids)
        torch.testing.assert_close(captured.decode(fast[batch], ids), expected, atol=2e-3, rtol=1e-3)
        for mine, theirs in zip(fast[batch], plain[batch], strict=True):
            same_block(mine, theirs)
            same_observations(mine, theirs)
    assert captured.graphs._steps == 40
    for sequence in (*plain, *fast):
        sequence.release()
