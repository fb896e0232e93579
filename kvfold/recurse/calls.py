"""Batched calls of one model behind one shared prefix, which is prefilled once and forked by every call.

    with Calls(model, "kvzip + global + 8x + int4", prefix="Answer from the text.\n\n") as calls:
        replies = calls.ask_batch([Prompt(f"{chunk}\n\nWho wrote this?") for chunk in chunks])

    batch    | prefix (shared pages) | text of call 0 | reply 0 |
             |                       | text of call 1 | reply 1 |

Calls are admitted while the arena has room for them, prefilled in packed passes, compressed by the policy, and decoded
together. A compressed cache leaves room for more calls, so a batch becomes wider the more a policy compresses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from kvfold.engine.generate import generate
from kvfold.engine.layer_major import Progress
from kvfold.engine.output_processor import Request
from kvfold.engine.sampling import Sampling
from kvfold.engine.scheduling.kv_bounds import KVBounds
from kvfold.engine.speculate import check_speculation, make_drafter
from kvfold.errors import InputError, OutOfPages, PolicyError
from kvfold.models.chat_template import Turn
from kvfold.models.loader import Model
from kvfold.models.special_tokens import TextEncoder
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.recurse.chunk_size import call_bytes
from kvfold.recurse.size_behind import policy_behind
from kvfold.recurse.usage import Usage
from kvfold.reply import Reply
from kvfold.session import Session
from kvfold.stats import Stats, measure

_PACKED_TOKENS = {"cpu": 8192, "cuda": 65_536}  # of one prefill pass: enough to keep the device busy
_WIDTH = {"cpu": 16, "cuda": 64}  # calls that are decoded together


@dataclass(frozen=True)
class Prompt:
    """One call: what stands behind the shared prefix, and how the reply begins and ends; temperature 0 is greedy."""

    text: str
    answer_prefix: str = ""
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    compress: bool = True  # by the policy
    temperature: float = 0.0
    seed: int = 0
    unlikely: tuple[str, ...] = ()  # how a reply begins only if that has at least half of the probability


@dataclass
class _Running:
    """An admitted call: its fork of the prefix, and what it was asked."""

    index: int
    prompt: Prompt
    ids: list[int]
    cache: SequenceCache
    sizes: Stats | None = None  # after the prefill
    request: Request | None = None


class Calls:
    """Owns the model, the policy and the session of the shared prefix. Close it, or use it in a `with` statement.

    `width`: calls decoded together at most. `speculate`: draft replies by n-gram lookup in the text of their call.
    `shares`: False reads the prefix anew in every call, as a baseline for what sharing saves.
    """

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "full",
        *,
        prefix: str = "",
        template: Literal["auto"] | None = "auto",
        width: int | None = None,
        speculate: bool | int = False,
        shares: bool = True,
    ) -> None:
        if width is not None and width < 1:
            raise InputError(f"width is {width}; at least one call runs at a time")
        check_speculation(speculate, ())
        self.model = model
        self.usage = Usage()
        self.prefix = prefix
        self.width = width or _WIDTH.get(model.device.type, _WIDTH["cpu"])
        self._packed = _PACKED_TOKENS.get(model.device.type, _PACKED_TOKENS["cpu"])
        self.speculate = speculate
        self._session = Session(model, policy, template=template)
        self.policy = self._session.policy
        if self.policy.shorten is not None:
            self.close()
            raise PolicyError(
                f'policy "{self.policy.short}" shortens texts, which then lose their places; shorten them beforehand, '
                "or leave shorten(...) out"
            )
        self._bounds = KVBounds(self._session.runner, self.policy)
        self._encoder = TextEncoder(model.tokenizer)
        self._prefix_ids = self._text_ids(prefix, "start", ()) if prefix else []
        self.num_prefix = len(self._prefix_ids)
        if self._prefix_ids and shares:
            began = time.perf_counter()
            self._session.extend(self._prefix_ids, compress=False, pin=True)
            self.usage.prefill_s += time.perf_counter() - began
            self.usage.tokens_read += self.num_prefix
        self.num_shared = len(self._session.token_ids)
        self._call_policy = policy_behind(self.policy, self.num_prefix, self._session.cache.config.open_len)

    def num_tokens(self, prompt: Prompt) -> int:
        """Tokens that a call prefills behind the prefix."""
        return len(self._ids(prompt)) - self.num_prefix + self.num_shared

    def call_bytes(self, num_tokens: int) -> int:
        """KV-cache bytes of a call of so many tokens, the shared prefix counted in: compressed, or as a replay holds
        them before."""
        return call_bytes(self._bounds, self._session.cache, self._call_policy, num_tokens)

    def ask_batch(self, prompts: Sequence[Prompt], *, progress: Progress | None = None) -> list[Reply]:
        """One reply for each prompt, in their order; OutOfPages if a single one does not fit into the arena."""
        found: dict[int, Reply] = {}
        for batch in self.batches(prompts, progress=progress):
            found.update(batch)
        return [found[index] for index in range(len(prompts))]

    def batches(
        self, prompts: Sequence[Prompt], *, progress: Progress | None = None
    ) -> Iterator[list[tuple[int, Reply]]]:
        """(index of a prompt, its reply) of each batch as it ends; whoever stops reading leaves the rest unasked."""
        waiting = [(index, prompt, self._ids(prompt)) for index, prompt in enumerate(prompts)]
        waiting.reverse()
        while waiting:
            running: list[_Running] = []
            try:
                yield self._run(waiting, running, progress)
            finally:
                for call in running:
                    call.cache.release()

    def _ids(self, prompt: Prompt) -> list[int]:
        """What a call prefills: the prefix where it is not shared, the text, and the opening of the reply."""
        conversation = self._session.conversation
        turn: Turn = "user" if self._prefix_ids and conversation.template is not None else "start"
        text = self._text_ids(prompt.text, turn, self._prefix_ids)
        opening = conversation.reply_ids(conversation.after_text, prompt.answer_prefix)
        return self._prefix_ids[self.num_shared :] + text + opening

    def _text_ids(self, text: str, turn: Turn, read: Sequence[int]) -> list[int]:
        """Strings of special tokens in a text are text, also without a chat template."""
        conversation = self._session.conversation
        quoted = self._encoder.quote(text) if conversation.template is None else text
        return conversation.text_ids(quoted, turn, read)

    def _fork(self) -> SequenceCache:
        cache = self._session.cache.fork()
        cache.policy = self._call_policy
        cache.pinned = [(0, self.num_prefix)] if self.num_prefix else []
        return cache

    # One batch

    def _run(
        self, waiting: list[tuple[int, Prompt, list[int]]], running: list[_Running], progress: Progress | None
    ) -> list[tuple[int, Reply]]:
        while waiting:
            group = self._admit(waiting, running)
            if not group:
                break
            running += group  # from here on they are released with the batch, whatever happens
            try:
                self._prefill(group, progress)
            except OutOfPages:
                del running[-len(group) :]
                for call in reversed(group):
                    call.cache.release()
                    waiting.append((call.index, call.prompt, call.ids))
                if running:
                    break
                if len(group) == 1:
                    raise
                self._packed = max(1, sum(len(call.ids) for call in group) // 2)
        runner = self._session.runner
        began, setup_s = time.perf_counter(), runner.setup_s
        requests = [call.request for call in running if call.request is not None]
        for _ in generate(runner, requests, self.model.tokenizer):
            pass
        setup_s = runner.setup_s - setup_s
        self.usage.setup_s += setup_s
        self.usage.decode_s += time.perf_counter() - began - setup_s
        self.usage.batches += 1
        return [(call.index, self._reply(call)) for call in running]

    def _admit(self, waiting: list[tuple[int, Prompt, list[int]]], running: Sequence[_Running]) -> list[_Running]:
        """Calls that are prefilled in one pass: as many as have room in the arena, one at least if nothing runs."""
        group: list[_Running] = []
        free, packed = self.model.arena.free_bytes, 0
        growth = self._bounds.kv_bytes(self._session.cache.config.open_len)
        free -= growth * len(running)
        try:
            while waiting and len(running) + len(group) < self.width:
                index, prompt, ids = waiting[-1]
                free -= self.call_bytes(self.num_shared + len(ids)) + growth
                packed += len(ids)
                if (running or group) and (free < 0 or (group and packed > self._packed)):
                    break
                group.append(_Running(index, prompt, ids, self._fork()))
                waiting.pop()
        except BaseException:
            for call in group:
                call.cache.release()
            raise
        return group

    def _prefill(self, group: Sequence[_Running], progress: Progress | None) -> None:
        """Calls that are compressed and calls that are not, each in one packed pass."""
        began = time.perf_counter()
        for compress in (True, False):
            mine = [call for call in group if call.prompt.compress is compress]
            if mine:
                self._pass(mine, compress, progress)
        usage = self.usage
        usage.prefill_s += time.perf_counter() - began
        for call in group:
            call.sizes = measure(call.cache)
            usage.tokens_read += len(call.ids)
            usage.tokens_shared += self.num_shared
            usage.full_bytes += call.sizes.full_bytes
            usage.resident_bytes += call.sizes.resident_bytes

    def _pass(self, calls: Sequence[_Running], compress: bool, progress: Progress | None) -> None:
        caches, ids = [call.cache for call in calls], [call.ids for call in calls]
        logits_BV = self._session.runner.prefill(caches, ids, compress=compress, progress=progress)
        eos = self.model.spec.eos_token_ids
        for call, logits_V in zip(calls, logits_BV, strict=True):
            drafter = make_drafter(call.ids, self.speculate, (), eos)
            prompt = call.prompt
            sampling = Sampling(prompt.temperature, seed=prompt.seed)
            first_V = self._without_unlikely(logits_V, prompt.unlikely)
            call.request = Request(call.cache, first_V, prompt.max_new_tokens, sampling, prompt.stop, drafter)

    def _without_unlikely(self, logits_V: Tensor, words: Sequence[str]) -> Tensor:
        """Logits of the first token, in which these words have no chance if others are more likely than they all."""
        ids = [token for word in words if (token := self._first_token(word)) is not None]
        if not ids or float(logits_V.softmax(-1)[ids].sum()) >= 0.5:
            return logits_V
        logits_V = logits_V.clone()
        logits_V[ids] = -torch.inf
        return logits_V

    def _first_token(self, word: str) -> int | None:
        """The token that a word begins with; None if that is white space alone, with which other words begin, too."""
        ids: list[int] = self.model.tokenizer(word, add_special_tokens=False)["input_ids"][:1]
        return ids[0] if self.model.tokenizer.decode(ids).strip() else None

    def _reply(self, call: _Running) -> Reply:
        assert call.request is not None and call.sizes is not None
        self.usage.calls += 1
        self.usage.tokens_generated += len(call.request.token_ids)
        self.usage.drafted += call.request.num_drafted
        self.usage.accepted += call.request.num_accepted
        return Reply.of(call.request, call.sizes)

    def close(self) -> None:
        """Free the shared prefix. Closing twice is fine."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
