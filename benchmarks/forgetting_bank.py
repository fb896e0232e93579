"""A bank of KV slots that learns: a prefix of M keys and values in every layer and KV head, as in prefix tuning.

    L layers   H KV heads   Q query heads   M slots   D head dim   B rows   T tokens   S slots and tokens   E hidden

It begins as the KV cache of a text; slot 0 is the attention sink and never trained. Sparse updates follow sparse memory
finetuning (arXiv:2510.15103): of the L x H x M slots only the `top` by TF-IDF of a batch's attention mass are updated.
Differences: slots are read by softmax attention, not by product keys; keys are trained, too; the optimizer is Adam,
and what it does to other slots is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from benchmarks.forgetting_arms import FullLearner
from benchmarks.forgetting_facts import Rows
from kvfold.memory.slots import tfidf_scores

Choice = Literal["all", "tfidf", "tf", "random"]


class BankLearner(FullLearner):
    """Keys and values of slots are trained, those that `choice` names."""

    def __init__(self, hf: Any, text_ids: Sequence[int], choice: Choice = "all", top: int = 0, seed: int = 0) -> None:
        self.hf, self.choice, self.top, self.seed = hf, choice, top, seed
        cache = DynamicCache()
        with torch.no_grad():
            hf.model(torch.tensor([text_ids], device=hf.device), past_key_values=cache, use_cache=True)
        pairs = [torch.stack([layer.keys[0] for layer in cache.layers])]
        pairs.append(torch.stack([layer.values[0] for layer in cache.layers]))
        self.trained = [nn.Parameter(each) for each in pairs]  # k_LHMD, v_LHMD
        self.mass_LHM = torch.zeros(pairs[0].shape[:3], device=hf.device)
        self.used_LHM, self.num_background = torch.zeros_like(self.mass_LHM), 0
        self.touched_LHM = torch.zeros_like(self.mass_LHM, dtype=torch.bool)

    def hidden(self, rows: Rows) -> Tensor:
        k_LHMD, v_LHMD = self.trained
        (batch, _), (_, num_heads, num_slots, _) = rows.ids_BT.shape, k_LHMD.shape
        cache = DynamicCache()
        for layer, (k_HMD, v_HMD) in enumerate(zip(k_LHMD, v_LHMD, strict=True)):
            cache.update(k_HMD.expand(batch, -1, -1, -1), v_HMD.expand(batch, -1, -1, -1), layer)
        mask = torch.cat([rows.mask_BT.new_ones(batch, num_slots), rows.mask_BT], dim=1).long()
        found = self.hf.model(
            rows.ids_BT, attention_mask=mask, past_key_values=cache, use_cache=True, output_attentions=True
        )
        weight_BT = rows.mask_BT.to(self.mass_LHM)
        for layer, a_BQTS in enumerate(found.attentions):
            mass_QM = torch.einsum("bqtm,bt->qm", a_BQTS.detach()[..., :num_slots], weight_BT)
            self.mass_LHM[layer] = mass_QM.view(num_heads, -1, num_slots).sum(1)
        self.mass_LHM[..., 0] = 0
        hidden_BTE: Tensor = found.last_hidden_state
        return hidden_BTE

    @torch.no_grad()
    def observe_background(self, batches: Sequence[Rows]) -> None:
        """Count in how many batches each slot has more than the mean mass of its head's slots."""
        self.used_LHM, self.num_background = torch.zeros_like(self.used_LHM), len(batches)
        for rows in batches:
            self.hidden(rows)
            self.used_LHM += self.mass_LHM > self.mass_LHM.mean(-1, keepdim=True)

    def choose(self) -> Tensor:
        """[L, H, M]: the slots that an update after the last forward may change."""
        if self.choice == "all":
            chosen_LHM = torch.ones_like(self.touched_LHM)
            chosen_LHM[..., 0] = False
            return chosen_LHM
        if self.choice == "random":  # the same ones in every step
            generator = torch.Generator().manual_seed(self.seed)
            score = torch.rand(self.mass_LHM.shape, generator=generator).to(self.mass_LHM.device)
            score[..., 0] = 0
        else:
            accesses, used = self.mass_LHM.flatten().cpu().numpy(), self.used_LHM.flatten().cpu().numpy()
            scores = tfidf_scores(accesses, used, self.num_background, has_idf=self.choice == "tfidf")
            score = torch.from_numpy(scores).to(self.mass_LHM.device)
        best = score.flatten().topk(self.top).indices
        chosen_LHM = torch.zeros_like(self.touched_LHM)
        chosen_LHM.view(-1)[best] = True
        return chosen_LHM

    @contextmanager
    def limited(self) -> Iterator[None]:
        chosen_LHM = self.choose()
        self.touched_LHM |= chosen_LHM
        before = self.state()
        for each in self.trained:
            assert each.grad is not None
            each.grad *= chosen_LHM[..., None]
        yield
        with torch.no_grad():
            for each, old in zip(self.trained, before, strict=True):
                each.copy_(torch.where(chosen_LHM[..., None], each, old))

    def restore(self, state: Sequence[Tensor]) -> None:
        super().restore(state)
        self.touched_LHM.zero_()

    def close(self) -> None:
        pass
