"""Two files of labels of the same tokens: how far the second is from the first.

Only the most likely tokens are known, so KL divergence is computed over the tokens that both have, and one bucket for
all others. Merging tokens never raises it: it is a lower bound of KL over the vocabulary.

    N labelled tokens   K labels of a token
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.errors import InputError
from kvfold.train.label_format import Labels
from kvfold.train.label_rows import Rows

_LEAST_MASS = 1e-12


@dataclass(frozen=True)
class LabelComparison:
    """Means over labels whose past was compressed in either file."""

    num_labels: int
    kl_nats: float  # KL(first || second) over the shared top tokens and the rest
    agreement: float  # share with the same most likely token
    nats_lost: float  # surprise of the tokens that came, second less first


def compare_labels(first: Labels, second: Labels) -> LabelComparison:
    """InputError unless both label the same tokens."""
    if not first.token_ids_T.equal(second.token_ids_T):
        raise InputError("the labels are of other tokens; compare labels of the same texts")
    return compare_rows(first.rows, second.rows)


def compare_rows(a: Rows, b: Rows) -> LabelComparison:
    """Of the same texts."""
    if not a.position_N.equal(b.position_N):
        raise InputError("the labels are at other positions; compare labels of the same texts")
    chosen_N = a.compressed_N | b.compressed_N
    if not bool(chosen_N.any()):
        raise InputError("no label has a compressed past; compare with labels under a policy that compresses")
    kl_N = kl_bound(a.topk_ids_NK, a.topk_logprobs_NK, b.topk_ids_NK, b.topk_logprobs_NK)[chosen_N]
    same_N = (a.topk_ids_NK[:, 0] == b.topk_ids_NK[:, 0])[chosen_N]
    lost_N = (a.token_logprobs_N - b.token_logprobs_N)[chosen_N]
    means = (float(column.double().mean()) for column in (kl_N, same_N, lost_N))
    return LabelComparison(len(kl_N), *means)


def kl_bound(p_ids_NK: Tensor, p_logs_NK: Tensor, q_ids_NK: Tensor, q_logs_NK: Tensor) -> Tensor:
    """[N]: KL over the tokens that both top lists share, and a bucket for all others."""
    is_same_NKK = p_ids_NK.unsqueeze(-1) == q_ids_NK.unsqueeze(-2)
    shared_NK = is_same_NKK.any(-1)
    p_NK = p_logs_NK.double().exp() * shared_NK
    q_NK = (q_logs_NK.double().exp().unsqueeze(-2) * is_same_NKK).sum(-1)
    inside_N = (p_NK * (p_NK.clamp(min=_LEAST_MASS).log() - q_NK.clamp(min=_LEAST_MASS).log())).sum(-1)
    p_rest_N, q_rest_N = ((1 - mass_NK.sum(-1)).clamp(min=_LEAST_MASS) for mass_NK in (p_NK, q_NK))
    return (inside_N + p_rest_N * (p_rest_N.log() - q_rest_N.log())).clamp(min=0)
