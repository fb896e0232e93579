"""Read a text that may be longer than the context window, and answer a question with quotes.

    level 1   chunk   chunk   chunk   chunk      each a fork of the shared prefix; all in engine batches
                |       |       |       |
              quote   nothing  quote   quote     words of a reply are looked up in its chunk
    level 2        quotes as a text              read in the same way
                        |
                      answer

Levels go on until one answer is left. A budget that runs out leaves the best answer so far, marked as such. With a
journal every batch of replies is on disk before the next one starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

from kvfold.engine.layer_major import Progress
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.special_tokens import literal_tokenizer
from kvfold.policy.policy import Policy
from kvfold.recurse.bounded_calls import BoundedCalls
from kvfold.recurse.budget import Budget, Meter, check_budget, check_counts
from kvfold.recurse.chat_prompts import PromptStyle, make_reading
from kvfold.recurse.chunk_size import memory_tokens, window_tokens
from kvfold.recurse.chunks import chunk_text
from kvfold.recurse.context import Context
from kvfold.recurse.journal import Journal, digest
from kvfold.recurse.levels import Levels
from kvfold.recurse.pieces import Piece, by_relevance, chunk_pieces, merge_pieces
from kvfold.recurse.prompts import check_question
from kvfold.recurse.result import KVFacts, ReadResult
from kvfold.recurse.tree import Node

ChunkSize = int | Literal["auto"]


class Reader:
    """One question about one context. `pieces` are the chunks that `read` reads before it merges.

    `ask` runs any pieces in batches, for others that build on it. Close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        question: str,
        policy: str | Policy = "full",
        *,
        chunk: ChunkSize = "auto",
        budget: Budget | None = None,
        max_new_tokens: int = 32,
        width: int | None = None,
        speculate: bool | int = False,
        shares: bool = True,
        prompts: PromptStyle = "auto",
    ) -> None:
        self.context, self.question = context, context.fill(question)
        check_question(self.question)
        check_counts(max_new_tokens=max_new_tokens, chunk=1 if chunk == "auto" else chunk)
        self.budget = check_budget(budget)
        meter = Meter(self.budget)
        self.reading = make_reading(model, prompts, self.question, context.header, max_new_tokens)
        self.calls = self.reading.calls(model, policy, width=width, speculate=speculate, shares=shares)
        try:
            self._check_budget()
            self.chunk_tokens = self._chunk_tokens(chunk)
            tokenizer = literal_tokenizer(model.tokenizer, context.text)
            self.pieces = chunk_pieces(context, chunk_text(context.text, self.chunk_tokens, tokenizer))
        except BaseException:
            self.close()
            raise
        meter.usage = self.calls.usage
        self.bounded = BoundedCalls(self.calls, meter)
        self.levels = Levels(context, self.question)

    def _check_budget(self) -> None:
        if self.budget.tokens is not None and self.budget.tokens <= self.calls.num_prefix:
            raise InputError(
                f"the budget of {self.budget.tokens} tokens leaves none for the text: instructions and question have "
                f"{self.calls.num_prefix}; give more"
            )

    def _chunk_tokens(self, chunk: ChunkSize) -> int:
        """Tokens of the text in one call at most."""
        model, calls = self.calls.model, self.calls
        around = calls.num_prefix + calls.num_tokens(self.reading.prompt("")) + self.reading.max_new_tokens
        most = window_tokens(model.spec.max_positions, around, model.name)
        if chunk == "auto":
            return memory_tokens(lambda count: calls.call_bytes(around + count), model.arena.free_bytes, most)
        if chunk > most:
            raise InputError(
                f"chunks of {chunk} tokens do not fit: the window of {model.name} has room for 1 to {most} beside the "
                "instructions and the question"
            )
        return chunk

    @property
    def run_key(self) -> str:
        """A digest of everything that replies depend on."""
        model = self.calls.model
        return digest({
            "text": self.context.digest, "prefix": self.calls.prefix,
            "model": model.session_digest, "dtype": model.spec.dtype, "kv_dtype": model.spec.kv_dtype,
            "policy": self.calls.policy.fingerprint, "chunk": self.chunk_tokens,
            "max_new_tokens": self.reading.max_new_tokens,
        })  # fmt: skip

    def resume(self, journal: Journal) -> None:
        """Take replies from a journal, and write new ones to it."""
        self.bounded.journal = journal

    @property
    def num_tokens(self) -> int:
        """Tokens that level 1 reads behind the shared prefix."""
        return sum(self.calls.num_tokens(self.reading.prompt(piece.text)) for piece in self.pieces)

    def read(self, *, progress: Progress | None = None) -> ReadResult:
        """Read all pieces and merge their answers, level by level; `progress` counts tokens of level 1."""
        has_merge = len(self.pieces) > 1 and self.budget.calls != 1 and self.budget.depth > 1
        self._read_level(self.pieces, progress, reserved_calls=int(has_merge))
        while len(self.levels.candidates) > 1 and self.bounded.stopped_by is None:
            level = self.levels.depth + 1
            if level > self.budget.depth:
                self.bounded.stopped_by = "depth"
                break
            pieces = merge_pieces(self.context, self.levels.last, level, self.chunk_tokens, self._count)
            self._read_level(pieces)
        return self.result()

    def _read_level(self, pieces: Sequence[Piece], progress: Progress | None = None, reserved_calls: int = 0) -> None:
        places = self.levels.begin(pieces)
        if self.budget.is_bounded:  # what has most words of the question first
            places = by_relevance(self.question, pieces, places)
        asked = [pieces[place] for place in places]
        for index, node in self.ask(asked, reserved_calls=reserved_calls, progress=progress):
            self.levels.note(places[index], node)

    def ask(
        self, pieces: Sequence[Piece], *, reserved_calls: int = 0, progress: Progress | None = None
    ) -> Iterator[tuple[int, Node]]:
        """(index of a piece, what was found in it), batch by batch; pieces beyond the budget do not come."""
        prompts = [self.reading.prompt(piece.text) for piece in pieces]
        for index, reply in self.bounded.replies(prompts, reserved_calls=reserved_calls, progress=progress):
            yield index, pieces[index].node(self.context, self.question, reply)

    def _count(self, text: str) -> int:
        return len(self.calls.model.tokenizer(text, add_special_tokens=False)["input_ids"])

    def result(self, *, interrupted: bool = False) -> ReadResult:
        """What is known now; of a reading that was interrupted, the partial tree."""
        usage, root, best = self.calls.usage, self.levels.root, self.levels.best
        stopped = "interrupt" if interrupted else self.bounded.stopped_by
        kv = KVFacts(usage.full_bytes, usage.resident_bytes) if usage.calls else KVFacts()
        return ReadResult(
            text="" if best is None else best.answer,
            quotes=self.levels.quotes,
            tree=root,
            usage=usage,
            kv=kv,
            stopped_by=stopped,
            is_plain=len(self.pieces) == 1,
            num_dropped=sum(node.state == "dropped" for node in root.walk()),
            num_cut=sum(node.is_cut for node in root.walk()),
            num_resumed=self.bounded.num_resumed,
            chunk_tokens=self.chunk_tokens,
            seconds=self.bounded.meter.seconds,
        )

    def close(self) -> None:
        """Free the shared prefix. Closing twice is fine."""
        self.calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(
    model: Model,
    context: str | Context,
    question: str,
    policy: str | Policy = "full",
    *,
    chunk: ChunkSize = "auto",
    budget: Budget | None = None,
    max_new_tokens: int = 32,
    prompts: PromptStyle = "auto",
    progress: Progress | None = None,
) -> ReadResult:
    """Answer a question about a text of any length, with quotes.

    Args:
        model: What `kvfold.load` returned.
        context: The text, or a `Context` with metadata and variables.
        question: May name variables of the context, as in "Who is {name}?".
        policy: Compresses the KV cache of every call.
        chunk: Tokens of the text in one call; "auto" is what window and memory allow.
        budget: Bounds on levels, calls, tokens and seconds.
        max_new_tokens: Tokens of a reply at most.
        prompts: "chat", a turn of the chat template; "plain", examples as plain text; "auto", "chat" for instruct
            models from half a billion parameters on.
        progress: Called with numbers of tokens as they are read.
    """
    known = context if isinstance(context, Context) else Context(context)
    with Reader(
        model,
        known,
        question,
        policy,
        chunk=chunk,
        budget=budget,
        max_new_tokens=max_new_tokens,
        prompts=prompts,
    ) as reader:
        return reader.read(progress=progress)
