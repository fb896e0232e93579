"""Votes of the window from the kernels equal the map in plain operations, summed over the window.

R rows   S slots   D head dim   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvfold.score.attention import masked_softmax
from kvfold.score.kernels import are_taken, window_votes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "group", "window", "slots", "dim"), [(2, 2, 32, 130, 64), (1, 3, 5, 1300, 16)])
def test_votes_equal_the_map(rows: int, group: int, window: int, slots: int, dim: int) -> None:
    torch.manual_seed(slots)
    q_RGWD = torch.randn(rows, group, window, dim, device=DEVICE)
    k_RSD = torch.randn(slots, rows, dim, device=DEVICE).transpose(0, 1)
    position_RS = torch.arange(slots, device=DEVICE).expand(rows, -1)
    q_position_RW = torch.arange(slots - window, slots, device=DEVICE).repeat(rows, 1)
    q_position_RW[0, 0] = -1  # a padded query sees nothing
    valid_RS = torch.ones(rows, slots, dtype=torch.bool, device=DEVICE)
    valid_RS[-1, 100:] = False
    found_RGS = window_votes(q_RGWD, k_RSD, position_RS, q_position_RW, valid_RS, 0.3)
    sees_RWS = (position_RS.unsqueeze(1) <= q_position_RW.unsqueeze(-1)) & valid_RS.unsqueeze(1)
    logit_RGWS = torch.einsum("rgwd,rsd->rgws", q_RGWD, k_RSD) * 0.3
    expected_RGS = masked_softmax(logit_RGWS, sees_RWS.unsqueeze(1)).sum(2)
    torch.testing.assert_close(found_RGS, expected_RGS, atol=1e-5, rtol=1e-4)


def test_the_kernels_take_16_bit_numbers_of_a_power_of_two() -> None:
    q, k = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 9, 64, dtype=torch.bfloat16)
    assert are_taken(q, k) and are_taken(q.half(), k.half())
    assert not are_taken(q.float(), k.float()) and not are_taken(q.half(), k)
    assert not are_taken(q[..., :48], k[..., :48])
