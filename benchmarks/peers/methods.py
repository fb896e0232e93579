"""What is measured on both sides: a peer's method with its arguments, and the kvfold policy that claims to be the same.

Presses stand at kvpress' defaults; kvfold's arguments follow them. `protect(none)` keeps kvfold from holding sinks and
the latest tokens by rule, which kvpress has no counterpart of.
"""

from __future__ import annotations

from benchmarks.peers.exchange import Method

FULL = Method("transformers:full", "full", "full")
PRESSES = (
    Method("kvpress:snapkv", "snapkv(window=64) + protect(none)", "press", "SnapKVPress"),
    Method("kvpress:expected", "expected + protect(none)", "press", "ExpectedAttentionPress"),
    Method("kvpress:keydiff", "keydiff + protect(none)", "press", "KeyDiffPress"),
    Method("kvpress:tova", "tova + protect(none)", "press", "TOVAPress"),
)
# What users of kvpress run on documents of their own, without a claim that kvfold has the same: `kvfold bench` answers.
NATURAL = (
    Method("kvpress:SnapKV", "", "press", "SnapKVPress"),
    Method("kvpress:ExpectedAttention", "", "press", "ExpectedAttentionPress"),
    Method("kvpress:KeyDiff", "", "press", "KeyDiffPress"),
    Method("kvpress:KVzip", "", "masked", "KVzipPress"),
    Method("kvpress:AdaKV(ExpectedAttention)", "", "masked", "AdaKVPress:ExpectedAttentionPress", {"epsilon": 1e-2}),
)
# No pair claims to be the same here: grouping, rotation and scales differ. The bits are.
QUANTIZED = (
    Method("transformers:quanto4", "full + int4", "quantized", "quanto", {"nbits": 4}),
    Method("transformers:quanto2", "full + int2", "quantized", "quanto", {"nbits": 2}),
    Method("transformers:hqq4", "full + kivi4", "quantized", "hqq", {"nbits": 4}),
    Method("transformers:hqq2", "full + kivi2", "quantized", "hqq", {"nbits": 2}),
)
