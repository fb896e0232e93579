"""A serialised sequence is a copy: it stays as it is when the pages go to others."""

from __future__ import annotations

import pytest
import torch

from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.serialize import dump
from kvfold.policy.policy import Policy
from tests import tiny


@pytest.mark.parametrize("num_new", [5, 32])
@pytest.mark.parametrize("policy", ["full", "int4", "h2o + 2x + int8"])
def test_what_is_dumped_shares_no_memory_with_the_sequence(model: Model, policy: str, num_new: int) -> None:
    """Also where the open block is full, all of whose slots are one stretch of the arena."""
    runner = Runner(model.hf, model.spec, model.arena)
    sequence = runner.new_sequence(Policy.parse(policy))
    runner.prefill([sequence], [tiny.prompt(40)])
    for token in tiny.prompt(num_new, seed=1):
        runner.decode([sequence], [token])
    assert sequence.open.fill == num_new
    found = dump(sequence)
    before = {name: tensor.clone() for name, tensor in found.items()}
    for k_HRD, v_HRD in zip(sequence.open.k, sequence.open.v, strict=True):
        k_HRD.fill_(7.0)
        v_HRD.fill_(7.0)
    for token in tiny.prompt(40, seed=2):
        runner.decode([sequence], [token])
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.items())
    sequence.release()
