"""Ctrl-C while a sequence's pages are written: it says so, and is not read with slots that its tokens do not have."""

from __future__ import annotations

import pytest

from kvfold.engine.runner import Runner
from kvfold.pages import compaction
from kvfold.policy.policy import Policy
from tests.tiny import prompt, ready


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x + int4"])
def test_a_sequence_whose_write_was_interrupted_can_only_be_released(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ready("llama")
    runner, free = Runner(model.hf, model.spec, model.arena), model.arena.free_bytes
    sequence = runner.new_sequence(Policy.parse(policy))
    runner.prefill([sequence], [prompt(50)])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compaction.PageRewrite, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.prefill([sequence], [prompt(20)])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="can only be released"):
        runner.prefill([sequence], [prompt(20)])
    with pytest.raises(RuntimeError, match="can only be released"):
        runner.decode([sequence], [5])
    sequence.release()
    assert model.arena.free_bytes == free
