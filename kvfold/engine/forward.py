"""Forward calls of the transformers module over packed tokens: layer-major prefill and eager decode steps.

Captured decode steps (cuda_graphs.py) and gradients (models/pass_cache.py) call the module on their own.

    packed tokens:  | sequence 0: chunk, chunk, … | sequence 1: chunk, … |

    T tokens   M hidden dims   N next tokens, given
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.engine.layer_major import LayerMajor, Progress, pieces
from kvfold.errors import ModelError
from kvfold.models.attach import is_attached, layers_wrapped, maskless
from kvfold.models.cpu_layer import compiled_layers
from kvfold.models.cpu_linear import few_rows
from kvfold.models.fused_layers import fused
from kvfold.models.pass_cache import DecodeCache, PassCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass


@dataclass(frozen=True)
class Forward:
    """The forward calls of one attached module."""

    hf: Any
    num_layers: int
    device: torch.device

    def prefill(
        self,
        current: PrefillPass,
        tokens: Sequence[Sequence[int]],
        chunk_len: int,
        progress: Progress | None,
        *,
        joined_len: int,
        hidden: bool,
    ) -> Tensor:
        """Each layer over all tokens, `chunk_len` of a sequence at a time, before the next layer; returns logits
        [batch, vocab] after the last tokens, or with `hidden` the last hidden states [packed tokens, M]."""
        lens = current.num_tokens
        ends = None if hidden else torch.tensor(lens, device=self.device).cumsum(0) - 1
        cut = list(pieces(current.sequences, tokens, chunk_len))
        order = LayerMajor(current, cut, progress, self.num_layers, ends, joined_len)
        starts = [sequence.sealed_len for sequence in current.sequences]
        positions = torch.cat([torch.arange(s, s + n, device=self.device) for s, n in zip(starts, lens, strict=True)])
        ids = [token for part in tokens for token in part]
        with maskless(), few_rows(self.hf), compiled_layers(self.hf), layers_wrapped(self.hf, order.wrap):
            out = self.call(ids, positions, order.cache, hidden=hidden)
        found: Tensor = (out.last_hidden_state if hidden else out.logits)[0]
        return found

    def decode(self, step: DecodePass, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [packed tokens, vocab] of a decode step, kernel by kernel."""
        positions = [s.logical_len + t for s, ids in zip(step.sequences, tokens, strict=True) for t in range(len(ids))]
        packed = [token for ids in tokens for token in ids]
        with maskless(), few_rows(self.hf), compiled_layers(self.hf):
            out = self.call(packed, positions, DecodeCache(step))
        logits: Tensor = out.logits[0].float()
        return logits

    def call(
        self,
        ids: Sequence[int],
        positions: Sequence[int] | Tensor,
        cache: PassCache | DecodeCache,
        *,
        hidden: bool = False,
    ) -> Any:
        """The module, or with `hidden` its base model without the output head, over packed token ids."""
        if not is_attached(self.hf):
            raise ModelError("the model was detached from kvfold; call kvfold.attach(model) before using it again")
        model = self.hf.base_model if hidden else self.hf
        with fused(self.hf):
            return model(
                input_ids=torch.tensor([list(ids)], device=self.device),
                position_ids=torch.as_tensor(positions, device=self.device).unsqueeze(0),
                past_key_values=cache,
                use_cache=True,
            )


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
