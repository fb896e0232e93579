"""What a request is answered with when it cannot be served; each wire format has its own shape for it."""

from __future__ import annotations

from http import HTTPStatus

from kvfold.errors import KvfoldError

# Names of Anthropic's errors by status; OpenAI's clients go by the status alone.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ApiError(KvfoldError):
    """An answer other than 200. `retry_after_s` tells clients when to come back."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "api_error")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def bad_request(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message)
