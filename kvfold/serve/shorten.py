"""Shortening of requests: each text of a user or a tool by itself, before the prompt is rendered.

A text is cut alike in every request that holds it, so prefixes are found in the cache as before. A selector that reads
the question cuts it differently each time: only text behind the last cache marker may be cut so. A text that cannot be
cut, for its size or for want of a question, is sent whole: a client sets neither.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvfold.errors import PolicyError, SizeError
from kvfold.policy.registry import term_of
from kvfold.policy.size import Percent, Ratio
from kvfold.serve.api.errors import bad_request
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.shortening.shorten import Shorten, Shortened, end_text, shorten_text
from kvfold.shortening.tokens import TokenOffsets

_KINDS = ("text", "tool_result")
_ROLES = ("user", "tool")
_MOST_TIMES = 16  # how much longer than the context a prompt may be, where the plan names a number of tokens


class RequestShortener:
    """Thread-safe: has a copy of the tokenizer."""

    def __init__(self, plan: Shorten, tokenizer: Any) -> None:
        self._plan, self._name = plan, term_of(plan.by).name
        if plan.by.needs_model:
            raise PolicyError(
                f"shorten({self._name}, …) asks the model, which is busy with requests here; serve with graph, "
                "keyphrases or plain rank"
            )
        self._tokenizer = copy.deepcopy(tokenizer)

    @property
    def times(self) -> float:
        """How many times longer than the model's context a prompt may be."""
        to = self._plan.to
        if isinstance(to, Ratio):
            return to.times
        return 100 / to.percent if isinstance(to, Percent) else _MOST_TIMES

    def shorten(self, request: ChatRequest) -> tuple[ChatRequest, int]:
        """The request with shorter texts, and how many tokens were cut."""
        if request.raw_ids is not None:
            return request, 0
        if request.raw_text is not None:
            done = self._cut(request.raw_text, request.raw_text)
            return replace(request, raw_text=done.text), done.num_original_tokens - done.num_tokens
        self._check_markers(request)
        question = next((one.text for one in reversed(request.blocks) if self._is_cut(one) and one.role == "user"), "")
        blocks, num_cut = [], 0
        for block in request.blocks:
            if self._is_cut(block):
                done = self._cut(block.text, question)
                block = replace(block, text=done.text)
                num_cut += done.num_original_tokens - done.num_tokens
            blocks.append(block)
        return replace(request, blocks=blocks), num_cut

    def _cut(self, text: str, question: str) -> Shortened:
        """`question`: the text at whose end it stands."""
        asked = end_text(question) if self._plan.by.needs_question and question.strip() else None
        if asked is not None or not self._plan.by.needs_question:
            with suppress(SizeError):
                return shorten_text(text, self._plan, question=asked, tokenizer=self._tokenizer, keeps_ends=True)
        return Shortened.whole(text, len(TokenOffsets.of(text, self._tokenizer)))

    def _check_markers(self, request: ChatRequest) -> None:
        """A text that each question would cut differently stands behind the last cache marker, or is short."""
        if not self._plan.by.needs_question:
            return
        marked = [number for number, block in enumerate(request.blocks) if block.ttl_s is not None]
        for block in request.blocks[: marked[-1] + 1] if marked else ():
            if self._is_cut(block) and len(TokenOffsets.of(block.text, self._tokenizer)) > self._plan.least:
                raise bad_request(
                    f"cache_control: this server cuts texts by the question (shorten({self._name}, …)), so a text "
                    "before a cache marker would change with every question; put the marker before the text, or leave "
                    "it out"
                )

    def _is_cut(self, block: Block) -> bool:
        return block.kind in _KINDS and block.role in _ROLES
