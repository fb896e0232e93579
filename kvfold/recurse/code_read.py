"""Read a text by code that the loaded model writes: its session is the root, sub-prompts are batched calls.

found = read_by_code(model, text, "How many letters are from Oslo?", "kvzip + global + 8x + int4")
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.recurse.budget import Budget, Meter, check_budget, check_counts
from kvfold.recurse.calls import Calls, Prompt
from kvfold.recurse.code_root import CodeAnswer, CodeRoot, RootStopped
from kvfold.recurse.context import Context
from kvfold.recurse.prompts import check_question
from kvfold.recurse.sandbox import SandboxLimits
from kvfold.session import Session

_TEMPLATE_TOKENS = 64  # around a message
_CHARS_PER_TOKEN = 3  # of a prompt that surely fits; longer ones are counted


@dataclass
class SessionRoot:
    """A session that writes code; its history only grows, so nothing is read twice. A reply ends with the seconds."""

    session: Session
    meter: Meter
    max_new_tokens: int = 512

    def reply(self, text: str) -> str:
        model, usage = self.session.model, self.meter.usage
        num_read = len(model.tokenizer(text, add_special_tokens=False)["input_ids"]) + _TEMPLATE_TOKENS
        if len(self.session.token_ids) + num_read + self.max_new_tokens > model.spec.max_positions:
            raise RootStopped("window")
        _, spent = self.meter.affordable([num_read + self.max_new_tokens])
        if spent is not None:
            raise RootStopped(spent)
        session, runner = self.session, self.session.runner
        prefill_s, num_before = session.prefill_s, len(session.token_ids)
        session.extend(text)
        pieces = session.generate(stream=True, max_new_tokens=self.max_new_tokens)
        num_prompt, began = len(session.token_ids), time.perf_counter() - runner.setup_s
        reply = "".join(takewhile(lambda _: not self.meter.is_late, pieces))
        del pieces  # ends a reply that is late
        usage.calls += 1
        usage.tokens_generated += len(session.token_ids) - num_prompt
        usage.tokens_read += num_prompt - num_before
        usage.prefill_s += session.prefill_s - prefill_s
        usage.decode_s += time.perf_counter() - runner.setup_s - began
        if self.meter.is_late:
            raise RootStopped("seconds")
        return reply


@dataclass
class SubCalls:
    """Answers prompts in engine batches, within the window and the budget; the last call is kept for the root."""

    calls: Calls
    meter: Meter
    max_new_tokens: int

    def __call__(self, texts: Sequence[str]) -> list[str]:
        prompts = [Prompt(text, max_new_tokens=self.max_new_tokens) for text in texts]
        needs = [self.calls.num_tokens(prompt) + self.max_new_tokens for prompt in prompts]
        window = self.calls.model.spec.max_positions
        if max(needs) > window:
            most = window - self.max_new_tokens
            raise InputError(f"a prompt has {max(needs) - self.max_new_tokens} tokens; at most {most} fit the window")
        count, spent = self.meter.affordable(needs, reserved_calls=1)
        if spent is not None:
            allowed = f"{count} of {len(prompts)} prompts"
            raise InputError(f"the budget of {spent} allows {allowed}; ask fewer, or answer from what you know")
        return [reply.text.strip() for reply in self.calls.ask_batch(prompts)]


def read_by_code(
    model: Model,
    context: str | Context,
    question: str,
    policy: str | Policy = "full",
    *,
    budget: Budget | None = None,
    max_turns: int = 20,
    max_new_tokens: int = 256,
    code_tokens: int = 512,
    width: int | None = None,
    limits: SandboxLimits | None = None,
) -> CodeAnswer:
    """Let the model write Python that reads a text of any length, and answer a question.

    Args:
        model: What `kvfold.load` returned; small models write code that rarely works.
        context: The text, or a `Context` with metadata and variables.
        question: May name variables of the context.
        policy: Compresses the KV cache of every sub-call; the root's is full.
        budget: Bounds on calls, tokens and seconds, the root's turns included; its depth does not apply.
        max_turns: Replies of the root at most.
        max_new_tokens: Of a sub-call's answer at most.
        code_tokens: Of a reply of the root at most.
        width: Sub-calls decoded together at most.
        limits: Of the sandbox.
    """
    known = context if isinstance(context, Context) else Context(context)
    question = known.fill(question)
    check_question(question)
    check_counts(max_turns=max_turns, max_new_tokens=max_new_tokens, code_tokens=code_tokens)
    budget, window = check_budget(budget), model.spec.max_positions
    limits = limits or SandboxLimits(output_chars=max(500, min(SandboxLimits.output_chars, window // 2)))
    meter = Meter(budget)
    with Calls(model, policy, width=width) as calls, Session(model) as session:
        meter.usage = calls.usage
        root = CodeRoot(
            SessionRoot(session, meter, code_tokens),
            SubCalls(calls, meter, max_new_tokens),
            limits,
            max_turns,
            prompt_chars=max(100, _CHARS_PER_TOKEN * (window - max_new_tokens - _TEMPLATE_TOKENS)),
            max_calls=budget.calls,
        )
        found = root.read(known.text, question, known.header)
        return replace(found, usage=calls.usage, seconds=meter.seconds)
