"""The loaded model as the judge of a text: losses, yes or no, attention of a question, and replies.

    told = LoadedModel(model)
    starts, losses = told.losses(text)

Every answer comes from a KV cache under `full`. Texts beyond the trained context are read in windows that overlap; what
is told of a token comes from the first window that holds it, so that all but the first window's have context.

    N tokens   S slots   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.errors import ModelError
from kvfold.models.chat_template import ChatTemplate, Conversation
from kvfold.models.loader import Model
from kvfold.models.special_tokens import TextEncoder
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.question_attention import QuestionPass
from kvfold.policy.policy import Policy
from kvfold.shortening.base import Floats, Progress
from kvfold.shortening.shorten import Shorten
from kvfold.shortening.tokens import blocks
from kvfold.shortening.windows import batches, token_windows
from kvfold.shortening.yes_no import yes_no_ids, yes_probabilities

Integers = NDArray[np.int64]
_UNKNOWN_CONTEXT = 4096  # tokens, of a model that does not say what it was trained on
_LOSS_WINDOW = 4096  # tokens; what stands further away hardly tells the next one
_NUM_SINKS = 4  # first tokens of a sequence, which attention rests on whatever they say
_NEUTRAL = "What is this text about?"


class LoadedModel:
    """The `LanguageModel` of selectors over a model that `kvfold.load` returned.

    `context_len`: tokens it reads at once, by default those it was trained on, as far as half of its arena holds them.
    """

    def __init__(self, model: Model, *, context_len: int | None = None) -> None:
        self.model = model
        self.context_len = context_len or _context_len(model)
        self.runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
        template = ChatTemplate.of(model.tokenizer)
        self._conversation = Conversation(model.tokenizer, template, model.spec.eos_token_ids)
        self._encoder = TextEncoder(model.tokenizer)
        self._policy = Policy.parse("full")

    def windows(self, text: str) -> list[tuple[int, int]]:
        """Spans of three quarters of the context, which leave room for the chat template and a question."""
        _, starts = self._encoded(text)
        ends = np.append(starts, len(text))
        found = token_windows(len(starts), self._text_len)
        return [(0 if low == 0 else int(starts[low]), int(ends[high])) for low, high in found]

    def losses(self, text: str, progress: Progress | None = None) -> tuple[Integers, Floats]:
        """The first token of a text has no context: its loss is ln V, unless the tokenizer puts a token before it."""
        ids, starts = self._encoded(text)
        loss_N = np.full(len(ids), math.log(self.model.spec.vocab_size))
        known = 0
        for low, high in token_windows(len(ids), min(self.context_len, _LOSS_WINDOW) - len(self._bos)):
            tokens = self._bos + ids[low:high]
            if len(tokens) > 1:
                with self._sequence() as sequence:
                    found = -self.runner.logprobs(sequence, tokens).cpu().numpy()
                first = max(known, low + 1 - len(self._bos))
                loss_N[first:high] = found[first - high :]
            known = high
            if progress is not None:
                progress(high, len(ids))
        return starts, loss_N

    def yes_probabilities(self, text: str, prompts: Sequence[str], progress: Progress | None = None) -> Floats:
        """The text is prefilled once; prompts run in batches on forks of its cache."""
        yes, no = self._answer_ids
        found: list[Floats] = []
        read = self._conversation.text_ids(text, "start", ())
        asked = [self._question_ids(prompt, read) for prompt in prompts]
        with self._sequence() as sequence:
            self.runner.prefill([sequence], [read])
            for batch in batches(asked):
                with _forks(sequence, len(batch)) as forks:
                    logits_BV = self.runner.prefill(forks, batch, compress=False)
                found.append(yes_probabilities(logits_BV, yes, no).numpy())
                if progress is not None:
                    progress(sum(map(len, found)), len(prompts))
        return np.concatenate(found) if found else np.zeros(0)

    def attention(self, text: str, question: str, progress: Progress | None = None) -> tuple[Integers, Floats]:
        """Mean attention of the question's tokens, over heads and layers, less that of a neutral question; the first
        four tokens of a sequence count as 0."""
        if not any(layer.compressible for layer in self.model.spec.layers):
            raise ModelError(
                f"every layer of {self.model.name} attends to a sliding window, so a question does not see the whole "
                "text; use rank or rank(judge)"
            )
        ids, starts = self._encoded(text)
        opening = self._opening
        score_N, known = np.zeros(len(ids)), 0
        for low, high in token_windows(len(ids), self._text_len):
            read = opening + ids[low:high]
            asked = [self._question_ids(one, read) for one in (question, _NEUTRAL)]
            own_S, neutral_S = self._question_attention(read, asked)
            score_S = own_S - neutral_S
            score_S[:_NUM_SINKS] = 0.0
            score_N[known:high] = score_S[known - high :]
            known = high
            if progress is not None:
                progress(high, len(ids))
        return starts, score_N

    def complete(self, prompt: str, max_new_tokens: int) -> str:
        """The greedy reply, through the chat template where there is one."""
        ids = self._conversation.text_ids(prompt, "start", ())
        ids += self._conversation.reply_ids(self._conversation.after_text)
        with self._sequence() as sequence:
            logits_V = self.runner.prefill([sequence], [ids])[0]
            request = Request(sequence, logits_V, max_new_tokens)
            for _ in generate(self.runner, [request], self.model.tokenizer):
                pass
        return request.text.strip()

    @torch.inference_mode()
    def _question_attention(self, read: list[int], asked: Sequence[list[int]]) -> list[Floats]:
        """[S] for each question: its mean attention to the tokens read."""
        spec = self.model.spec
        num_heads = sum(spec.layers[layer].num_query_heads for layer in spec.compressible_layers)
        with self._sequence() as sequence:
            self.runner.prefill([sequence], [read])
            with _forks(sequence, len(asked)) as forks:
                current = QuestionPass.begin(forks, list(map(len, asked)), compress=False)
                self.runner.run_pass(current, asked, hidden=True)
        return [
            (mass_S / (num_heads * len(ids))).double().cpu().numpy()
            for mass_S, ids in zip(current.mass, asked, strict=True)
            if mass_S is not None
        ]

    @property
    def _text_len(self) -> int:
        return max(1, self.context_len * 3 // 4 - len(self._opening))

    def _encoded(self, text: str) -> tuple[list[int], Integers]:
        """Token ids of a text and the first character of each."""
        ids: list[int] = []
        starts: list[int] = []
        for low, high in blocks(text):
            some, firsts = self._encoder.offsets(text[low:high])
            ids += some
            starts += [low + first for first in firsts]
        return ids, np.array(starts, dtype=np.int64)

    def _question_ids(self, question: str, read: Sequence[int]) -> list[int]:
        """Tokens of a question behind a text, up to where the reply begins."""
        turn = self._conversation.after_text
        cue = "\nAnswer:" if self._conversation.template is None else ""
        return self._conversation.text_ids(f"\n\n{question}{cue}", turn, read) + self._conversation.reply_ids(turn)

    @cached_property
    def _opening(self) -> list[int]:
        """Tokens in front of a user's first text."""
        template = self._conversation.template
        return self._bos if template is None else self._encoder.ids(template.opening)

    @cached_property
    def _bos(self) -> list[int]:
        """The token that the tokenizer puts before a text, if it does."""
        bos = self.model.tokenizer.bos_token_id
        return [bos] if bos is not None and self._encoder.ids("", special=True)[:1] == [bos] else []

    @cached_property
    def _answer_ids(self) -> tuple[list[int], list[int]]:
        yes, no = yes_no_ids(self.model.tokenizer)
        if not yes or not no:
            raise ModelError(f"{self.model.name}: yes and no begin with the same token, so it cannot judge; use rank")
        return yes, no

    @contextmanager
    def _sequence(self) -> Iterator[SequenceCache]:
        sequence = self.runner.new_sequence(self._policy)
        try:
            yield sequence
        finally:
            sequence.release()


@contextmanager
def _forks(sequence: SequenceCache, count: int) -> Iterator[list[SequenceCache]]:
    """Branches over the same slots, copy-on-write."""
    forks: list[SequenceCache] = []
    try:
        for _ in range(count):
            forks.append(sequence.fork())
        yield forks
    finally:
        for fork in forks:
            fork.release()


def _context_len(model: Model) -> int:
    trained = model.spec.max_positions or _UNKNOWN_CONTEXT
    slot_bytes = model.spec.full_bytes(1) * model.spec.kv_dtype.itemsize // 2
    return max(1, min(trained, model.arena.capacity_bytes // 2 // slot_bytes))


def judge(plan: Shorten, model: Model | None) -> LoadedModel | None:
    """The model, where the plan's selector asks one."""
    return LoadedModel(model) if model is not None and plan.by.needs_model else None
