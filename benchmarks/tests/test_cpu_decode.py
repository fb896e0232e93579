"""Random caches of benchmarks/cpu_decode.py hold what their policy keeps."""

from __future__ import annotations

import pytest

from benchmarks.cpu_decode import filled
from kvfold.engine.runner import Runner
from kvfold.models.loader import wrap
from kvfold.stats import measure
from tests import tiny


@pytest.mark.parametrize(("policy", "slots"), [("full", 800), ("snapkv + 8x", 100), ("snapkv + ada + 8x + int4", 100)])
def test_a_random_cache_has_the_slots_of_its_policy(policy: str, slots: int) -> None:
    model = wrap(tiny.build("llama"), tiny.tokenizer())
    sequence = filled(Runner(model.hf, model.spec, model.arena), policy, 800)
    open_len = 32 if "8x" in policy else 0  # a size pays for the open block, which is empty
    assert measure(sequence).mean_slots == pytest.approx(slots - open_len, abs=2)
    sequence.release()
