"""HTTP errors of the API: status, Anthropic's error type, OpenAI's code, retry-after."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from kvfold.errors import KvfoldError

# Anthropic's error types by status; OpenAI's clients go by the status alone.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
MAX_MESSAGE = 1000


class ApiError(KvfoldError):
    """A response other than 200. Messages quote client input, so they are made printable here.

    `logged` is the message without client input, which may be prompt text and is never logged. `code` is OpenAI's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        logged: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.status = status
        self.logged = printable(message if logged is None else logged)
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "api_error")

    @property
    def openai_status(self) -> int:
        """529 is Anthropic's own."""
        return HTTPStatus.SERVICE_UNAVAILABLE.value if self.status == 529 else self.status


def bad_request(message: str, logged: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, logged=logged)


def prompt_too_long(message: str) -> ApiError:
    """Anthropic's words and OpenAI's code, by which their clients know it."""
    return ApiError(HTTPStatus.BAD_REQUEST, f"prompt is too long: {message}", code="context_length_exceeded")


def printable(text: str) -> str:
    """One line of bounded length that every encoding, log and terminal takes."""
    text = text[:MAX_MESSAGE]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
