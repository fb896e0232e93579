"""What a policy does, in words: the sentences name what really is in it."""

from __future__ import annotations

from kvfold.policy import Policy
from kvfold.policy.describe import explain
from kvfold.policy.registry import find


def test_full_keeps_everything() -> None:
    said = explain(Policy.parse("full"))
    assert said["prefill"] == said["decode"] == "everything is kept"
    assert said["codec"] == "native on all layers; lossless"


def test_a_phase_names_its_choices() -> None:
    said = explain(Policy.parse("prefill(snapkv(window=8) + ada + 8x + merge) + int4(layers=2:-2)"))
    for part in ("after_prefill: Once", "scored by snapkv(window=8)", "by ada", "down to 8x", "merge"):
        assert part in said["prefill"]
    assert "protect(sinks=4, recent=32) always stays" in said["prefill"]
    assert said["codec"].endswith("on layers 2:-2, the others native; lossy")


def test_decoding_without_a_trigger_evicts_nothing() -> None:
    assert explain(Policy.parse("knorm + 8x"))["decode"].startswith("nothing is evicted (never): ")
    assert explain(Policy.parse("knorm + 2048tok"))["decode"].startswith("on_overflow: ")


def test_position_and_reader_come_from_their_terms() -> None:
    said = explain(Policy.parse("knorm + 8x + slot"))
    slot = find("slot")
    assert slot is not None
    assert said["position"] == slot.summary
    assert "Every stored slot" in said["attend"]
