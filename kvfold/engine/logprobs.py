"""Log-probabilities of prompt tokens from the last hidden states, 256 rows of logits at a time.

T tokens   M hidden dims   N next tokens, given
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ROWS = 256  # of logits at once


def next_logprobs(head: nn.Module, hidden_TM: Tensor, next_ids: Sequence[int]) -> Tensor:
    """fp32 [N]: ln p of each token after the hidden state in front of it."""
    found = [torch.empty(0, device=hidden_TM.device)]
    next_N = torch.tensor(list(next_ids), dtype=torch.int64, device=hidden_TM.device)
    for begin in range(0, len(next_N), _ROWS):
        next_n = next_N[begin : begin + _ROWS]
        logprob_nV = head(hidden_TM[begin : begin + len(next_n)]).float().log_softmax(-1)
        found.append(logprob_nV.gather(-1, next_n.unsqueeze(-1)).squeeze(-1))
    return torch.cat(found)


def surprise(head: nn.Module, hidden_TM: Tensor, ids: Sequence[int]) -> Tensor:
    """fp32 [T]: surprisal -ln p of every token; inf for the first, which has no context."""
    first = torch.full((1,), torch.inf, device=hidden_TM.device)
    return torch.cat((first, -next_logprobs(head, hidden_TM, ids[1:])))
