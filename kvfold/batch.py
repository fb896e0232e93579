"""Offline batch inference: prompts prefilled in one pass and decoded together (static batching)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvfold.engine.generate import generate
from kvfold.engine.layer_major import Progress
from kvfold.engine.output_processor import Request
from kvfold.engine.sampling import Sampling
from kvfold.engine.speculate import check_speculation, make_drafter
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.reply import Reply
from kvfold.session import Session


def generate_batch(
    model: Model,
    prompts: Sequence[str],
    policy: str | Policy = "full",
    *,
    template: Literal["auto"] | None = "auto",
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    speculate: bool | int = False,
    draft_from: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
) -> list[Reply]:
    """Replies to a ragged batch of prompts, prefilled and decoded together; each is compressed at its end."""
    if isinstance(prompts, str) or not prompts:
        raise InputError("prompts is a non-empty list of texts")
    check_speculation(speculate, draft_from)
    sessions: list[Session] = []
    try:
        for _ in prompts:
            sessions.append(Session(model, policy, template=template))
        conversation, runner = sessions[0].conversation, sessions[0].runner
        opening = conversation.reply_ids(conversation.after_text)
        texts = [session.shorter_prompt(prompt) for session, prompt in zip(sessions, prompts, strict=True)]
        ids = [conversation.text_ids(text, "start", ()) + opening for text in texts]
        logits = runner.prefill([session.cache for session in sessions], ids, progress=progress)
        eos = model.spec.eos_token_ids
        requests = [
            Request(
                session.cache,
                row,
                max_new_tokens,
                Sampling(temperature, top_k, top_p, seed + i),
                stop,
                make_drafter(ids[i], speculate, draft_from, eos),
            )
            for i, (session, row) in enumerate(zip(sessions, logits, strict=True))
        ]
        for _ in generate(runner, requests, model.tokenizer):
            pass
        return [Reply.of(request, session.stats()) for session, request in zip(sessions, requests, strict=True)]
    finally:
        for session in sessions:
            session.close()
