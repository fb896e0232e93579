"""Teacher labels: top-k log-probabilities of the tokens of texts, under any policy of the KV cache.

    labels = label(model, [text], "kvzip + global + 4x + int4")
    labels.write(Path("labels.safetensors"))

Cartridges (arXiv:2506.06266) trains on the 20 most likely tokens of a teacher; the mass of all others is kept beside
them, so that a loss can be a proper cross-entropy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch

import kvfold
from kvfold.errors import FileError, InputError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.train.label_batches import LabelBatches
from kvfold.train.label_format import LabelHeader, Labels, vocabulary_digest
from kvfold.train.label_parts import LabelParts
from kvfold.train.label_pass import LabelInput, Labeller
from kvfold.train.label_rows import joined
from kvfold.train.label_windows import Window, WindowPlan, bos_ids

DEFAULT_TOPK = 20
Progress = Callable[[int, int], None]  # labels that are done, and all


def _silent(done: int, total: int) -> None:
    pass


def label(
    model: Model,
    texts: Sequence[str],
    policy: str | Policy = "full",
    *,
    topk: int = DEFAULT_TOPK,
    window: int | None = None,
    context: int | None = None,
    batch: int | None = None,
    names: Sequence[str] | None = None,
    parts: Path | None = None,
    progress: Progress = _silent,
) -> Labels:
    """The labels of texts, window by window.

    Args:
        model: The teacher.
        texts: Each is labelled on its own. Strings of special tokens become these tokens.
        policy: Of the KV cache of contexts.
        topk: Labels of each token.
        window: Tokens that are read at once; by default the trained window, at most 4096.
        context: Tokens of a window in front of those that are labelled; by default half of it.
        batch: Windows that are labelled in one pass; by default as many as keep the device busy.
        names: Of the texts, for the header.
        parts: A folder for what is done so far; a run with the same texts, model and options goes on with it, and it is
            yours to remove (`LabelParts.remove`).
        progress: Called with the number of labels that are done, and of all.
    """
    run = LabelRun(model, texts, policy, topk, WindowPlan.of(model.spec.max_positions, window, context), names)
    return run.labels(LabelParts(parts, run.key), batch, progress)


class LabelRun:
    """Texts, cut into windows, and what they are labelled with; all of it is checked at the start."""

    def __init__(
        self,
        model: Model,
        texts: Sequence[str],
        policy: str | Policy,
        topk: int,
        plan: WindowPlan,
        names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(texts, str) or not texts:
            raise InputError("texts is a non-empty list of texts")
        self.labeller, self._bos = Labeller(model, Policy.parse(policy), topk), bos_ids(model.tokenizer)
        self._ids = [model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        lens = list(map(len, self._ids))
        self._offsets = torch.tensor([0, *lens]).cumsum(0)
        self._windows = plan.cut(lens, has_bos=bool(self._bos))
        self.caches = self.labeller.policy.fingerprint != Policy.parse("full").fingerprint
        self._check(plan)
        self.header = LabelHeader(
            version=kvfold.__version__,
            model=model.name,
            weights=model.session_digest,
            tokenizer=vocabulary_digest(model.tokenizer),
            vocab_size=model.spec.vocab_size,
            policy=self.labeller.policy.short,
            fingerprint=self.labeller.policy.fingerprint,
            topk=topk,
            window=plan.window,
            context=plan.context,
            names=tuple(names or (f"text {i}" for i in range(len(texts)))),
        )

    def _check(self, plan: WindowPlan) -> None:
        largest = max((max(ids, default=0) for ids in self._ids), default=0)
        if largest >= (size := self.labeller.runner.spec.vocab_size):
            raise InputError(f"the tokenizer gives token id {largest}, the model has a vocabulary of {size}")
        if not self._windows:
            raise InputError("the texts have too few tokens to predict one from another; give longer ones")
        if not self.caches:
            return
        if max(map(len, self._ids)) <= plan.context:
            raise InputError(
                f'no text is longer than the context of {plan.context} tokens, so "{self.labeller.policy.short}" '
                "would compress nothing; use a smaller context, or the policy full"
            )
        num_cached = plan.context - 1 + len(self._bos)
        self.labeller.check_context(num_cached)
        if self.labeller.keeps_all(num_cached):
            raise InputError(
                f'policy "{self.labeller.policy.short}" keeps all {num_cached} tokens of a context as they are; use a '
                "smaller size, a longer context, or the policy full"
            )

    @property
    def num_labels(self) -> int:
        return sum(window.num_labels for window in self._windows)

    @property
    def key(self) -> str:
        """What tells runs apart: texts, model and options."""
        facts = [*vars(self.header).items(), str(self.labeller.runner.spec.dtype), self._ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def labels(self, parts: LabelParts, batch: int | None = None, progress: Progress = _silent) -> Labels:
        """Label what `parts` do not have yet."""
        positions = [self._position(window) + i for window in self._windows for i in range(window.num_labels)]
        done = parts.load(positions, self.header.topk, self.header.vocab_size)
        left = self._left(done)
        progress(done, self.num_labels)
        for found in LabelBatches(self.labeller, left, batch):
            parts.add(found.rows)
            done += len(found.rows.position_N)
            progress(done, self.num_labels)
        ids_T = torch.tensor([token for ids in self._ids for token in ids], dtype=torch.int32)
        return Labels(self.header, ids_T, self._offsets, joined(parts.found))

    def _left(self, done: int) -> list[LabelInput]:
        """The windows behind the first `done` labels."""
        ends = [0, *accumulate(window.num_labels for window in self._windows)]
        if done not in ends:
            raise FileError("the parts of an earlier run end inside of a window; remove their folder to label anew")
        return [self._input(window, self.caches) for window in self._windows[ends.index(done) :]]

    def _position(self, window: Window) -> int:
        return int(self._offsets[window.text]) + window.begin

    def inputs(self, *, caches: bool) -> list[LabelInput]:
        """Windows that have a context, which is cached or, as under `full`, fed with the rest in one pass."""
        return [self._input(window, caches) for window in self._windows if self._past(window)[1:]]

    def _past(self, window: Window) -> list[int]:
        return [*self._bos, *self._ids[window.text][window.start : window.begin]]

    def _input(self, window: Window, caches: bool) -> LabelInput:
        ids = self._ids[window.text]
        past = self._past(window)
        cached = past[:-1] if caches else []
        fed = [*past[len(cached) :], *ids[window.begin : window.end - 1]]
        return LabelInput(cached, fed, ids[window.begin : window.end], self._position(window))
