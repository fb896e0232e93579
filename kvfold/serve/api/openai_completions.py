"""OpenAI's text completions API: the prompt is tokenized without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.openai import (
    LOGIT_NEUTRAL,
    NEUTRAL,
    OpenAIBody,
    read_cache_options,
    read_sampling,
    read_stream,
    read_who,
)
from kvfold.serve.api.openai_chat import failed_event, finish_reason, usage_json
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.validation import Fields, Neutral, Only
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

DEFAULT_MAX_TOKENS = 16  # OpenAI's
COMPLETION_NEUTRAL: dict[str, Neutral] = {
    **NEUTRAL,
    **LOGIT_NEUTRAL,
    "best_of": Only("one reply is written for each request", (1,)),
    "echo": Only("the prompt is not sent back", (False,)),
    "logprobs": Only("log probabilities are not supported"),
    "suffix": Only("replies are not fitted to what follows them", ("",)),
}


def read_completion(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/completions."""
    body = Fields(data)
    model, (is_streamed, shows_usage) = body.text("model"), read_stream(body)
    prompt = _prompt(body)
    most = settings.limits.output_tokens
    max_tokens = body.integer("max_tokens", min(DEFAULT_MAX_TOKENS, most), 1, most)
    sampling, stop = read_sampling(body, settings), body.texts("stop", 4)
    body.neutral(COMPLETION_NEUTRAL)
    read_who(body)
    cache_options = read_cache_options(body, ("30m",))
    body.end()
    request = ChatRequest(model, [Block("text", "user", prompt, 0)], max_tokens, sampling, stop, raw_text=prompt)
    return OpenAIBody(request, cache_options, is_streamed, shows_usage)


def _prompt(body: Fields) -> str:
    """A text, or a list of one, as some clients send it."""
    found = body.require("prompt")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, str) or not found:
        body.refuse("prompt", "one text that is not empty is required; send a request for each prompt")
    return found


class CompletionWriter:
    """One reply as a text completion."""

    def __init__(self, service: Service, body: OpenAIBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._created = int(time.time())

    def _completion(self, text: str, reason: str | None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head(), "choices": [choice]}

    def _head(self) -> Json:
        model = self._reply.request.model
        return {"id": f"cmpl-{self._reply.id}", "object": "text_completion", "created": self._created, "model": model}

    async def whole(self) -> Json:
        text = "".join([str(part) async for part in self._reply.parts()])
        return {**self._completion(text, finish_reason(self._reply)), "usage": usage_json(self._service, self._reply)}

    async def events(self) -> AsyncIterator[Json]:
        async for part in self._reply.parts():
            yield self._completion(str(part), None)
        yield self._completion("", finish_reason(self._reply))
        if self._body.shows_usage:
            yield {**self._head(), "choices": [], "usage": usage_json(self._service, self._reply)}

    def failed(self, error: ApiError) -> Json:
        return failed_event(error)
