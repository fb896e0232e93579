"""The size of a policy for texts behind a shared prefix: the prefix stays whole, the size counts what follows it.

    | prefix: pinned, in shared pages | text of a call: 8x of its own tokens |

With sizes over all tokens, an eighth of a short text behind long instructions would be less than the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvfold.policy.parts import Stage
from kvfold.policy.policy import Policy
from kvfold.policy.size import Size, SizeFacts


@dataclass(frozen=True)
class SizeBehind(Size):
    """`size` of the tokens behind the first `num_shared`, which are kept beside it; never below `least` slots."""

    size: Size
    num_shared: int
    least: int

    @property
    def is_absolute(self) -> bool:
        return self.size.is_absolute

    @property
    def counts_bytes(self) -> bool:
        return self.size.counts_bytes

    def slots_per_head(self, facts: SizeFacts) -> int:
        num_own = max(0, facts.num_tokens - self.num_shared)
        full_bytes = facts.full_bytes * num_own // max(1, facts.num_tokens)
        own = replace(facts, num_tokens=num_own, full_bytes=full_bytes)
        return self.num_shared + max(self.least, self.size.slots_per_head(own))

    def __str__(self) -> str:
        return str(self.size)


def policy_behind(policy: Policy, num_shared: int, open_len: int) -> Policy:
    """The policy for a text behind so many shared tokens; a text that is short beside its protected slots keeps more
    than its size, instead of an error."""
    prefill, decode = (_behind(stage, num_shared, open_len) for stage in (policy.prefill, policy.decode))
    return replace(policy, prefill=prefill, decode=decode)


def _behind(stage: Stage, num_shared: int, open_len: int) -> Stage:
    if stage.size is None:
        return stage
    floor = stage.protect.floor(stage.score.needs.window, open_len, sinks=stage.score.needs.sinks)
    return replace(stage, size=SizeBehind(stage.size, num_shared, floor.slots))
