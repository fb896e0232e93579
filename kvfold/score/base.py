"""Scorers: which KV slots to keep. A scorer gives every stored slot of a layer a number; higher means keep.

With GQA the query heads of a group share one score per KV head. A scorer is vectorised over rows (R = all (sequence, KV
head) pairs of one layer, sequence-major) and never sees the batch. Rows are padded on the right; `valid_RS` tells which
slots exist. Slots stand in order of position. What a scorer needs to look at is data on its class, and the runner
provides exactly that.

    R rows   S slots   D head dim   G query heads per KV head   W queries of the window   T new queries
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from kvfold.core import LayerSpec
from kvfold.errors import InputError, PolicyError
from kvfold.policy.registry import Term, term_of
from kvfold.score.predictor import LayerPredictor


@dataclass(frozen=True)
class Replay:
    """How a prompt is read a second time: `chunk` tokens of it at a time, each behind a request to repeat them.

    A query's softmax runs over what was stored before the prompt, the first `sinks` positions, its chunk and what was
    repeated so far. With `by_hidden` its weights are divided by the norm of the hidden state that attention was given.
    With `surprise` they are multiplied by min(1, s / surprise), s = -ln p of the token that it is about to repeat, as
    the model saw it in the first reading.
    """

    chunk: int = 2048
    sinks: int = 4
    by_hidden: bool = False
    surprise: float = 0.0  # nats; 0: all queries count the same
    queries: int = 0  # tokens of the repetition whose queries are kept, evenly spaced
    study: int = 0  # tokens of each answer to questions about the text, whose queries are kept too


@dataclass(frozen=True)
class Needs:
    """What a scorer looks at besides keys, values and positions.

    last_queries   the last so many post-RoPE queries (0: none); they span chunk borders
    keeps_window   whether the tokens of these queries always stay, and the budget has to hold them
    sinks          the first so many tokens always stay (+inf), and the budget has to hold them
    recent         so do the last so many, whether their queries are looked at or not
    new_queries    all post-RoPE queries of the tokens that a prefill pass adds; none of them while decoding
    mass           attention mass each slot received from all queries that could see it, and their number
    query_stats    mean and covariance of the pre-RoPE queries
    replay         the largest weight any query of a second reading gave each slot (not while decoding)
    output         the output projection of attention, head by head
    predictor      what was trained on this model to predict scores: a file, or "" for what comes with the package
    size           how many slots a head keeps on average; without it scores of one prompt serve policies of all sizes
    protected      which slots stay by rule, whatever their score: protected and pinned ones
    sentence_len   which sentence each slot is of, longer ones cut into pieces of so many tokens (0: not asked for)
    end_of_prompt  must not be asked before the end of the prompt is there (refused between chunks)
    """

    last_queries: int = 0
    keeps_window: bool = True
    sinks: int = 0
    recent: int = 0
    new_queries: bool = False
    mass: bool = False
    query_stats: bool = False
    replay: Replay | None = None
    output: bool = False
    predictor: str | None = None
    size: bool = False
    protected: bool = False
    sentence_len: int = 0
    end_of_prompt: bool = False

    @property
    def judges_by_end(self) -> bool:
        """Whether scores of a prefix depend on where the prompt ends; a second reading asks the prefix itself."""
        return bool(self.last_queries) or (self.end_of_prompt and self.replay is None)

    @property
    def slots_alone(self) -> bool:
        """Whether keys, values and positions are all that is looked at."""
        return replace(self, keeps_window=True, sinks=0, recent=0, end_of_prompt=False) == Needs()

    @property
    def window(self) -> int:
        """Slots at the end that the scorer always keeps."""
        return max(self.recent, self.last_queries if self.keeps_window else 0)


@dataclass
class QueryStats:
    """Moments of the pre-RoPE queries of a row's group, leaving out the first `num_sinks` tokens of the sequence."""

    mean_RGD: Tensor
    cov_RGDD: Tensor


@dataclass
class View:
    """The stored slots of one layer. Optional parts are present exactly when the scorer's `needs` ask for them."""

    layer: int
    num_layers: int
    spec: LayerSpec
    num_heads: int  # rows per sequence: row r belongs to sequence r // num_heads
    k_RSD: Tensor  # post-RoPE, in the model's dtype
    v_RSD: Tensor
    position_RS: Tensor  # int64; padding holds 0
    valid_RS: Tensor  # bool
    seen_R: Tensor  # int64: tokens committed at the end of this call, the logical length
    bias_RS: Tensor | None = None  # fp32: log-biases of fitted slots (evicted/fit.py)
    slots_per_head: int = 0  # what a head keeps on average, sealed slots only; 0 where it is not asked for
    q_RGWD: Tensor | None = None  # the last W queries; a shorter prompt pads on the left
    q_position_RW: Tensor | None = None  # int64; -1 where padded
    new_q_RGTD: Tensor | None = None  # of positions seen - T .. seen - 1; a shorter prompt pads on the left
    mass_RS: Tensor | None = None  # fp32, summed over the group
    mass_count_RS: Tensor | None = None  # fp32: queries that could see the slot, summed over the group
    stats: QueryStats | None = None
    replay_RGS: Tensor | None = None  # fp32: the largest weight of a second reading, by query head
    wo_HGDM: Tensor | None = None  # the output projection; row r belongs to head r % num_heads
    protected_RS: Tensor | None = None  # bool: stays by rule, whatever its score
    predictor: LayerPredictor | None = None  # this layer's
    sentence_RS: Tensor | None = None  # int64: the number of the slot's sentence, from 0 on; padding holds 0

    @property
    def len_R(self) -> Tensor:
        return self.valid_RS.sum(-1)

    def masked(self, score_RS: Tensor) -> Tensor:
        """fp32 scores with -inf where there is no slot."""
        if score_RS.shape != self.valid_RS.shape:
            raise PolicyError(_shape_rule("scores", self, score_RS))
        return score_RS.float().masked_fill(~self.valid_RS, -torch.inf)

    def window(self, term: str) -> tuple[Tensor, Tensor]:
        """The last queries and their positions, for a scorer whose `needs` ask for them."""
        return given(term, self.q_RGWD, "q_RGWD"), given(term, self.q_position_RW, "q_position_RW")


class Scorer(Term, ABC):
    """One required method; class data says what it needs and whether it evicts at all."""

    keeps_all: bool = False  # `full`: no size, no eviction
    least: tuple[tuple[str, float], ...] = ()  # numbers that arguments must reach

    def __post_init__(self) -> None:
        """PolicyError for the first argument below its least."""
        for argument, least in self.least:
            if (value := getattr(self, argument)) is not None and value < least:
                raise PolicyError(f"{term_of(self).name}({argument}={value}): {argument} must be at least {least}")

    @property
    def reuse_layers(self) -> int:
        """How many consecutive layers share the scores of the first of them."""
        return 1

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def default_prefill_trigger(self) -> str:
        """The trigger of a prefill under an absolute size: `between_chunks` for scores that need positions alone."""
        return "after_prefill"

    @abstractmethod
    def score(self, view: View) -> Tensor:
        """Scores [R, S], fp32, higher = keep. +inf: this method always keeps the slot. Padding is ignored."""


def scored(scorer: Scorer, view: View) -> Tensor:
    """The scores of a view, -inf where there is no slot; PolicyError if their shape is another or, on a CPU, if a
    stored slot has none. A caller on a GPU asks `unscored` for that when the device is waited for."""
    found = scorer.score(view)
    if not isinstance(found, Tensor) or found.shape != view.valid_RS.shape:
        raise PolicyError(_shape_rule(f"scores of {_name(scorer)}", view, found))
    score_RS = view.masked(found)
    if score_RS.device.type == "cpu":
        check_scored(scorer, view.layer, bool(unscored(score_RS, view)))
    return score_RS


def unscored(score_RS: Tensor, view: View) -> Tensor:
    """bool []: whether any stored slot is scored NaN or -inf."""
    return ((score_RS > -torch.inf) != view.valid_RS).any()


def check_scored(scorer: Scorer, layer: int, is_unscored: bool) -> None:
    if is_unscored:
        raise PolicyError(
            f"scores of {_name(scorer)} are NaN, or -inf for a stored slot, in layer {layer}; run "
            f"kvfold.testing.check_scorer({type(scorer).__name__}()), or look for NaN in the model's keys and values"
        )


def _shape_rule(what: str, view: View, found: object) -> str:
    given = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    return f"{what} must be a tensor of the shape [rows, slots] {list(view.valid_RS.shape)}, not {given}"


def _name(scorer: Scorer) -> str:
    """As policies write it; a scorer inside a test may be unregistered."""
    try:
        return term_of(scorer).name
    except PolicyError:
        return type(scorer).__name__


class WindowScorer(Scorer):
    """Looks at the last `window` queries (the observation window of SnapKV), whose own slots always stay."""

    window: int
    kernel = 1  # slots that are pooled
    least = (("window", 1),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel < 1 or self.kernel % 2 == 0:
            name = f"{term_of(self).name}(kernel={self.kernel})"
            raise PolicyError(f"{name}: kernel must be odd, so that a slot is its own centre")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, end_of_prompt=True)


_Part = TypeVar("_Part")


def share(term: str, argument: str, value: float, of: str = "") -> None:
    if not 0 <= value <= 1:
        raise PolicyError(f"{term}({argument}={value}): {argument} is a share{of}, from 0 to 1")


def one_of(term: str, argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PolicyError(f"{term}({argument}={value}): {argument} must be one of {', '.join(allowed)}")


def given(term: str, part: _Part | None, name: str) -> _Part:
    """The part of the view that the scorer's `needs` asked for."""
    if part is None:
        raise InputError(f"{term} needs view.{name}, which is missing; provide what its `needs` declare")
    return part
