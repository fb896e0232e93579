"""One conversation over one compressed KV cache: extend, ask, generate, fork, save, load.

    session = Session(model, policy="snapkv + ada + 8x + int4")
    session.extend(long_text)
    print(session.ask("What is the code?").text)

With a chat model, text goes into an open user turn: `extend` adds to it, `ask` and `generate` close it and open the
reply. `template=None` encodes text as it is; token ids are never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack, cast, overload

from torch import Tensor

from kvfold.engine.generate import generate
from kvfold.engine.layer_major import Progress
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import Sampling
from kvfold.engine.speculate import check_speculation, make_drafter
from kvfold.errors import FileError, InputError, PolicyError
from kvfold.models.chat_template import ChatTemplate, Conversation, Turn
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.reply import GenerateOptions, Reply, checked
from kvfold.session_io import SessionState, read_session, restore_cache, save_session
from kvfold.shortening.loaded_model import judge
from kvfold.shortening.messages import shorten_messages
from kvfold.shortening.shorten import Shortened, shorten_text
from kvfold.stats import Stats, kept_positions, measure


class Session:
    """A token sequence and its KV cache. Close it, or use it in a `with` statement, to free its pages."""

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "full",
        *,
        template: Literal["auto"] | None = "auto",
        page_size: int = PageConfig.page_size,
        open_len: int = PageConfig.open_len,
        chunk_len: int | None = None,
    ) -> None:
        self.model = model
        self.policy = Policy.parse(policy)
        check_policy(self.policy, model.spec)
        self.template = ChatTemplate.of(model.tokenizer) if template == "auto" else None
        self.conversation = Conversation(model.tokenizer, self.template, model.spec.eos_token_ids)
        self.runner = Runner(model.hf, model.spec, model.arena, chunk_len=chunk_len, compile=model.compile)
        self.cache = self.runner.new_sequence(self.policy, PageConfig(page_size, open_len))
        self.token_ids: list[int] = []  # all of them; the last few may not be in the KV cache yet
        self.shortened: list[Shortened] = []  # of texts that the policy shortened, in their order
        self.prefill_s = 0.0
        self._turn: Turn = "start"
        self._logits_V: Tensor | None = None
        self._is_closed = False

    # Prefill

    def extend(
        self,
        text: str | Sequence[int] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        compress: bool = True,
        pin: bool = False,
        max_tokens: int | None = None,
        question: str | None = None,
        progress: Progress | None = None,
    ) -> Session:
        """Prefill text, token ids, or messages (through the chat template), and compress by the policy.

        A policy with `shorten(...)` cuts texts first; `question` is what `shorten(rank, …)` keeps them for.
        `compress=False` keeps all new tokens; `pin=True` also protects them from every later eviction. Of a text longer
        than `max_tokens` the first ones are read. Token ids are read as they are.
        """
        if (text is None) == (messages is None):
            raise InputError("extend takes either text (or token ids) or messages=[…]")
        if max_tokens is not None and (max_tokens < 1 or not isinstance(text, str)):
            raise InputError(f"max_tokens is {max_tokens}: it is at least 1, and cuts text, not token ids or messages")
        if compress and messages is not None:
            messages = self._shorter_messages(messages, question)
        elif compress and isinstance(text, str):
            text = self._shorter(text, question)
        if messages is not None:
            return self._read(self.conversation.message_ids(messages, self._turn), "between", compress, pin, progress)
        if isinstance(text, str):
            ids = self.conversation.text_ids(text, self._turn, self.token_ids)[:max_tokens]
            return self._read(ids, self.conversation.after_text, compress, pin, progress)
        return self._read([int(token) for token in text or ()], self._turn, compress, pin, progress)

    def _shorter(self, text: str, question: str | None) -> str:
        if self.policy.shorten is None:
            return text
        plan = self.policy.shorten
        done = shorten_text(
            text, plan, question=question, tokenizer=self.model.tokenizer, model=judge(plan, self.model), may_stay=True
        )
        self.shortened.append(done)
        return done.text

    def _shorter_messages(self, messages: list[dict[str, Any]], question: str | None = None) -> list[dict[str, Any]]:
        if self.policy.shorten is None:
            return messages
        plan, tokenizer = self.policy.shorten, self.model.tokenizer
        messages, done = shorten_messages(
            messages, plan, question=question, tokenizer=tokenizer, model=judge(plan, self.model)
        )
        self.shortened += done
        return messages

    def shorter_prompt(self, prompt: str) -> str:
        """A prompt whose question stands at its end, as the policy shortens it."""
        content: str = self._shorter_messages([{"role": "user", "content": prompt}])[0]["content"]
        return content

    def _read(
        self, ids: list[int], turn: Turn, compress: bool, pin: bool = False, progress: Progress | None = None
    ) -> Session:
        self._require_open()
        if not ids:
            raise InputError("there is nothing to read: the input is empty")
        began = time.perf_counter()
        start = len(self.token_ids)
        pending = self.token_ids[self.cache.committed_len :]
        if pin:
            self.cache.pinned.append((start, start + len(ids)))
        try:
            logits = self.runner.prefill([self.cache], [pending + ids], compress=compress, progress=progress)
        except BaseException:
            self._interrupted(ids, turn, pin)
            raise
        self._logits_V = logits[0]
        self.token_ids += ids
        self._turn = turn
        self.prefill_s += time.perf_counter() - began
        return self

    def _interrupted(self, ids: list[int], turn: Turn, pin: bool) -> None:
        """Record the chunks that were finished before an interruption, where the policy compresses between chunks."""
        start, end = len(self.token_ids), self.cache.committed_len
        if pin:
            self.cache.pinned.pop()
        if end <= start:
            return
        if pin:
            self.cache.pinned.append((start, end))
        self.token_ids += ids[: end - start]
        self._logits_V, self._turn = None, turn

    @property
    def is_closed(self) -> bool:
        """Whether its pages are free."""
        return self._is_closed

    def _require_open(self) -> None:
        if self._is_closed:
            raise InputError("the session is closed; make a new one")

    # Generation

    def ask(
        self,
        question: str,
        *,
        answer_prefix: str = "",
        max_new_tokens: int = 64,
        **options: Unpack[GenerateOptions],
    ) -> Reply:
        """Ask without changing the session: fork, prefill the question uncompressed, generate.

        The model continues an answer that begins with `answer_prefix`; the reply's text is what comes behind it.
        """
        with self.fork() as branch:
            in_turn = self.template is not None and self._turn == "user"
            branch.extend(f"\n\n{question}" if in_turn else question, compress=False)
            if answer_prefix:
                branch._begin_reply(answer_prefix)
            reply: Reply = branch.generate(max_new_tokens=max_new_tokens, **options)
            return reply

    @overload
    def generate(
        self, *, stream: Literal[False] = False, max_new_tokens: int = 256, **options: Unpack[GenerateOptions]
    ) -> Reply: ...
    @overload
    def generate(
        self, *, stream: Literal[True], max_new_tokens: int = 256, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]: ...
    def generate(
        self, *given: object, stream: bool = False, max_new_tokens: int = 256, **options: Unpack[GenerateOptions]
    ) -> Reply | Iterator[str]:
        """Continue; options are those of `GenerateOptions`.

        Returns a Reply, or with `stream` an iterator over text deltas; the reply becomes part of the session.
        """
        if given:
            raise TypeError("generate takes no text; extend(text) first, or ask(question), which forgets the question")
        on_text = checked(options).pop("on_text", None)
        request = self._request(max_new_tokens, **cast(dict[str, Any], options))
        pieces = self._stream(request, on_text)
        if stream:
            return pieces
        for _ in pieces:
            pass
        return Reply.of(request, self.stats())

    def _request(
        self,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        speculate: bool | int = False,
        draft_from: Sequence[Sequence[int]] = (),
    ) -> Request:
        sampling = Sampling(temperature, top_k, top_p, seed)
        check_speculation(speculate, draft_from)
        self._require_open()
        if not self.token_ids:
            raise InputError("the session is empty; extend it before generating")
        self._begin_reply()
        if self._logits_V is None:
            raise InputError("the last extend was interrupted between chunks; extend with the rest before generating")
        drafter = make_drafter(self.token_ids, speculate, draft_from, self.model.spec.eos_token_ids)
        return Request(self.cache, self._logits_V, max_new_tokens, sampling, stop, drafter)

    def _begin_reply(self, prefix: str = "") -> None:
        """Close an open user turn, begin the reply with `prefix`, and run sampled tokens that are not cached yet."""
        opening = self.conversation.reply_ids(self._turn, prefix)
        if opening:
            self._read(opening, "reply", compress=False)
        for token in self.token_ids[self.cache.committed_len :]:
            self._logits_V = self.runner.decode([self.cache], [token])[0]

    def write(self, text: str) -> Session:
        """Add `text` to the model's reply as if it had been generated, uncompressed; an open user turn is closed."""
        self._require_open()
        if not text or not self.token_ids:
            raise InputError("there is nothing to write, or nothing before it; extend the session, then give a text")
        self._begin_reply(text)
        return self

    def next_logits(self) -> Tensor:
        """Logits [vocab] of the next token of the reply; an open user turn is closed."""
        self._require_open()
        if self.token_ids:
            self._begin_reply()
        if self._logits_V is None:
            raise InputError("the session is empty, or its last extend was interrupted; extend it first")
        return self._logits_V

    def _stream(self, request: Request, on_text: Callable[[str], None] | None) -> Iterator[str]:
        try:
            for _, piece in generate(self.runner, [request], self.model.tokenizer):
                if on_text is not None:
                    on_text(piece)
                yield piece
        finally:  # also when the caller stops reading, or interrupts
            self.cache.commit_all()
            self.token_ids += request.token_ids
            self._turn = "reply"
            self._logits_V = request.logits_V

    def kept(self, layer: int, head: int) -> list[int]:
        """Original positions of the slots that one head keeps."""
        return kept_positions(self.cache, layer, head)

    def stats(self) -> Stats:
        """Sizes now: lengths, resident bytes, bytes read per decode step, slots by layer and head."""
        return replace(measure(self.cache), prefill_s=self.prefill_s)

    def fork(self) -> Session:
        """A second session over the same tokens; sealed pages are shared, copy-on-write."""
        self._require_open()
        cache = self.cache.fork()  # first: if it raises, no branch exists that would release this cache
        branch = object.__new__(Session)
        branch.__dict__.update(
            self.__dict__ | {"cache": cache, "token_ids": list(self.token_ids), "shortened": list(self.shortened)}
        )
        return branch

    def rewind(self, earlier: Session) -> None:
        """Become an earlier fork of this session again, to the last bit; the fork is closed.

        What was read and generated since the fork is cropped from the cache, and what was evicted since then is back.
        """
        self._require_open()
        earlier._require_open()
        shared = self.token_ids[: len(earlier.token_ids)]
        if earlier is self or earlier.model is not self.model or earlier.token_ids != shared:
            raise InputError("rewind takes a fork that this session has continued; give what fork() returned before")
        self.cache, earlier.cache = earlier.cache, self.cache
        for name in ("token_ids", "shortened", "_turn", "_logits_V"):
            setattr(self, name, getattr(earlier, name))
        earlier.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self.fork()

    __copy__ = fork

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError("a session cannot be pickled: its slots lie in one process; use save() and Session.load")

    def close(self) -> None:
        """Free the pages. Closing twice is fine."""
        self.cache.release()
        self.token_ids = []
        self._is_closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        cache: SequenceCache | None = self.__dict__.get("cache")
        if cache is not None:
            cache.release()

    def save(self, path: str | Path) -> None:
        """Write the session to a file: compressed pages as they are, with checksum, policy and weights digest."""
        self._require_open()
        state = SessionState(
            policy=str(self.policy),
            fingerprint=self.policy.fingerprint,
            page_size=self.cache.config.page_size,
            open_len=self.cache.config.open_len,
            chunk_len=self.runner.chunk_len,
            template=self.template is not None,
            turn=self._turn,
            token_ids=self.token_ids,
            logits_V=self._logits_V,
        )
        save_session(Path(path), self.model, self.cache, state)

    @classmethod
    def load(cls, model: Model, path: str | Path) -> Session:
        """Load a saved session; FileError if it is truncated, altered, or of other weights."""
        path = Path(path)
        state, tensors = read_session(path, model)
        try:
            session = cls(
                model,
                state.policy,
                template="auto" if state.template else None,
                page_size=state.page_size,
                open_len=state.open_len,
                chunk_len=state.chunk_len,
            )
        except PolicyError as error:
            raise FileError(f"{path} has a policy this version cannot run: {error}") from error
        try:
            if session.policy.fingerprint != state.fingerprint:
                policy = session.policy.short
                raise FileError(f'{path} was saved when "{policy}" meant something else; read the text again')
            restore_cache(session.cache, tensors, state, path)
        except BaseException:
            session.close()
            raise
        session.token_ids, session._turn, session._logits_V = state.token_ids, state.turn, state.logits_V
        return session
