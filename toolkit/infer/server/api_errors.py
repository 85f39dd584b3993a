"""Errors in OpenAI's JSON form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from toolkit.chat_rows import short
from toolkit.infer.engine.engine_thread import EngineFailure, GrammarFailure

MAX_CHARACTERS = 1000  # of a message

# The errors in the OpenAPI document; FastAPI's own are 422s.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "A wrong request; `error.param` names the field"},
    "5XX": {"description": "The server failed"},
}


class ApiError(Exception):
    """An error reply. status: the HTTP status; param: the wrong field; code: the machine-readable reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_sendable(message))
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        self.kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON to send."""
        param = None if self.param is None else _sendable(self.param)
        return {"error": {"message": str(self), "type": self.kind, "param": param, "code": self.code}}


def _sendable(text: str, longest: int = MAX_CHARACTERS) -> str:
    """The text without what a message may quote: lone surrogates, which UTF-8 does not have, and the middle of a long
    one."""
    text = text if len(text) <= longest else f"{text[: longest // 2]} .. {text[-longest // 2 :]}"
    return text.encode("utf-8", "replace").decode()


def context_length_exceeded(prompt_tokens: int, max_tokens: int | None, context_length: int, param: str) -> ApiError:
    """The 400 for a prompt and answer that exceed the context. Sizes in tokens."""
    if max_tokens is None:
        asked = f"the prompt has {prompt_tokens} tokens and needs at least one more for the answer"
    else:
        asked = f"the prompt has {prompt_tokens} tokens and the answer may have {max_tokens}"
    remedy = "shorten the prompt" if prompt_tokens >= context_length else "shorten the prompt or lower max_tokens"
    message = f"this model's context is {context_length} tokens, but {asked}; {remedy}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


# OpenAI's client asks again after a 5xx by itself. A request that is out of time would come back as new load.
FINAL = {"x-should-retry": "false"}


def to_api_error(error: Exception) -> ApiError:
    """The reply to an error of the body, of the engine (a 400 if the request's own grammar was the cause) or, for any
    other one, of the server."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return from_validation(error.errors())
        case GrammarFailure():
            message = f"{error}; give a smaller schema or expression"
            return ApiError(400, message, code="grammar_failed", headers=FINAL)
        case EngineFailure():
            return ApiError(500, str(error), code="engine_failure")
    return ApiError(500, f"internal error: {type(error).__name__}: {error}")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One 400 for pydantic's validation errors, with the names of the fields. errors: ValidationError.errors()."""
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {errors[0]['ctx']['error']}", code="invalid_json")
    if tuple(errors[0]["loc"]) == ("body",) and errors[0]["type"] in ("model_attributes_type", "missing"):
        problem = "empty" if errors[0]["type"] == "missing" else "not a JSON object"
        message = f"the body is {problem}; send a JSON object with the header Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    described = [_describe(error) for error in _deepest(errors)]
    message = "; ".join(text for _, text, _ in described)
    return ApiError(400, message, param=described[0][0], code=described[0][2])


def _deepest(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One error per field. For a union: the error of the branch that validated the largest part of the value."""
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for error in errors:
        branches = [i for i, part in enumerate(error["loc"]) if _is_branch(part)]
        field = tuple(error["loc"][: branches[0]]) if branches else tuple(error["loc"])
        if field not in best or len(error["loc"]) > len(best[field]["loc"]):
            best[field] = error
    return list(best.values())


def _is_branch(part: str | int) -> bool:
    """Whether a part of a location is pydantic's tag of a union's branch ("str", "list[int]", "NamedChoice")."""
    return isinstance(part, str) and (part == "str" or part.endswith("]") or part[:1].isupper())


def _describe(error: Mapping[str, Any]) -> tuple[str | None, str, str | None]:
    """(param, message, code) of one error."""
    parts = [part for part in error["loc"] if part != "body" and not _is_branch(part)]
    context = error.get("ctx") or {}
    param = _path([*parts, context["param"]] if "param" in context else parts)
    if error["type"] == "extra_forbidden":
        return param, f"unknown field '{param}'", "unknown_parameter"
    if error["type"] == "missing":
        return param, f"the field '{param}' is missing", "missing_required_parameter"
    if error["type"] == "unsupported_parameter":
        return param, error["msg"], "unsupported_parameter"
    if error["type"] == "too_short":
        return param, f"'{param}' is empty", "invalid_value"
    if "param" in context:
        return param, error["msg"], "invalid_value"
    return param, f"'{param or 'body'}': {error['msg']}, got {short(error.get('input'))}", "invalid_value"


def _path(parts: Sequence[Any]) -> str | None:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    return text or None


def install(app: FastAPI) -> None:
    """Make the app return all errors, including FastAPI's, in OpenAI's form. The Gate does it for other errors."""

    async def reply(_: Request, error: Exception) -> JSONResponse:
        answer = to_api_error(error)
        return JSONResponse(answer.body, answer.status, answer.headers)

    for kind in (ApiError, RequestValidationError, EngineFailure):
        app.add_exception_handler(kind, reply)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message, code = f"{error.detail}: {request.method} {request.url.path}", None
        if isinstance(error.__cause__, UnicodeDecodeError):  # raised by the parser of JSON
            message, code = f"the body is not valid UTF-8 (byte {error.__cause__.start})", "invalid_json"
        return JSONResponse(ApiError(error.status_code, message, code=code).body, error.status_code, error.headers)
