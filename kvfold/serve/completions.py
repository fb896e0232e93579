"""OpenAI's text completions: a prompt that goes in as it is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from kvfold.serve.api_error import ApiError
from kvfold.serve.ask import Ask
from kvfold.serve.chat import finish_reason, usage
from kvfold.serve.fields import Fields
from kvfold.serve.openai import Json, OpenAIBody, read_neutral, read_sampling
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def read_completion(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/completions."""
    body = Fields(data)
    model, is_streamed = body.text("model"), body.flag("stream", False)
    prompt = body.text("prompt")
    if not prompt:
        body.refuse("prompt", "a text that is not empty is required")
    most = settings.limits.output_tokens
    max_tokens = body.integer("max_tokens", min(DEFAULT_MAX_TOKENS, most), 1, most)
    sampling, stop = read_sampling(body, settings), body.texts("stop", 4)
    options = body.object("stream_options")
    shows_usage = options is not None and options.flag("include_usage", False)
    if options is not None:
        options.end()
    body.integer("n", 1, 1, 1)
    body.integer("best_of", 1, 1, 1)
    if body.flag("echo", False):
        body.refuse("echo", "the prompt is not sent back; leave it out")
    read_neutral(body)
    body.end()
    ask = Ask(model, (), max_tokens, sampling, stop, raw_text=prompt)
    return OpenAIBody(ask, None, is_streamed, shows_usage)


class CompletionWriter:
    """One reply as a text completion."""

    def __init__(self, service: Service, body: OpenAIBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._created = int(time.time())

    def _completion(self, text: str, reason: str | None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head(), "choices": [choice]}

    def _head(self) -> Json:
        model = self._reply.ask.model
        return {"id": f"cmpl-{self._reply.id}", "object": "text_completion", "created": self._created, "model": model}

    async def whole(self) -> Json:
        text = "".join([str(part) async for part in self._reply.parts()])
        return {**self._completion(text, finish_reason(self._reply)), "usage": usage(self._service, self._reply)}

    async def events(self) -> AsyncIterator[Json]:
        try:
            async for part in self._reply.parts():
                yield self._completion(str(part), None)
        except ApiError as error:
            yield {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}
            return
        yield self._completion("", finish_reason(self._reply))
        if self._body.shows_usage:
            yield {**self._head(), "choices": [], "usage": usage(self._service, self._reply)}
