"""Errors as OpenAI's API shapes them: {"error": {"message", "type", "param", "code"}} and a status.

Owns the mapping from what went wrong to what a client sees. It must not know routes. A message may name parameters and
figures, never a secret. Enter at `ApiError` and `from_inferd`.
"""

import msgspec

from engine.errors import ContextTooLong, DeadlineExceeded, EngineFault, InferdError, RequestError, TokenizerError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# Errors of choices that the engine had; their status alone would say 'shed'.
_REASONS = {"aborted": "abort", "engine_died": "error", "deadline_exceeded": "deadline"}


class ApiError(Exception):
    """One HTTP answer that is not a success. `code` is bounded: it reaches records and metrics."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        """The `reason` of a request record that ended in this error. Shed is what the engine never had."""
        known = _REASONS.get(self.code)
        if known is not None:
            return known
        if self.status in (429, 503):
            return "shed"
        return "error" if self.status >= 500 else "rejected"

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        )

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request itself is at fault; `param` names the part."""
    return ApiError(400, message, code=code, param=param)


def from_inferd(error: InferdError) -> ApiError:
    """What the engine's typed errors are over HTTP."""
    if isinstance(error, ContextTooLong | TokenizerError):
        return ApiError(400, str(error), code=error.code)
    if isinstance(error, EngineFault):
        return ApiError(503, str(error), code=error.code, retry_after_s=2)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code=error.code)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code=error.code)
    return ApiError(500, str(error), code=error.code)


def from_outcome(code: str, message: str) -> ApiError:
    """A choice that the engine ended without an answer: `code` is an Output's error_code, or the finish reason."""
    if code in ("deadline", "deadline_exceeded"):
        return ApiError(504, message or "the deadline of the request passed", code="deadline_exceeded")
    if code == "abort":
        return ApiError(503, message or "the request was aborted by the server", code="aborted", retry_after_s=2)
    if code == "context_length_exceeded":
        return ApiError(400, message, code=code)
    if code == "engine_died":
        return ApiError(503, message, code=code, retry_after_s=2)
    return ApiError(500, message or "the engine could not go on with this request", code=code or "internal_error")
