"""Bodies of generation requests: from bytes to a checked `Ask`, or an ApiError that names the parameter at fault.

Owns which parameters exist, their types and their bounds. It must not know the tokenizer, the engine's state or HTTP
beyond the error. Enter at `parse_chat` and `parse_completion`. Whatever is not understood is refused by name: a
parameter that is silently ignored would be a wrong answer.
"""

from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from daemon.api.bounds import check_bounds, check_stop, logit_bias, within
from daemon.api.errors import ApiError, invalid

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 256
MAX_LOGPROBS: Final = 20
DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's default for /v1/completions

# Parameters of OpenAI's API that are not served, with the values by which a client says 'no, thanks'.
_DECLINED: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "logit_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """Obfuscation, padding of chunks against eavesdroppers, is accepted and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes accept. `None` is absent."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    return_token_ids: bool | None = None  # as vLLM: each choice says its token ids
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None  # accepted, not used: it identifies somebody
    metadata: dict[str, Any] | None = None  # accepted, not used


class ChatBody(Common, frozen=True, kw_only=True):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class CompletionBody(Common, frozen=True, kw_only=True):
    """/v1/completions."""

    prompt: Any  # str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checked generation request. `sampling` holds arguments of engine.request.SamplingParams, as far as they are
    known before the prompt's length is."""

    operation: str  # chat | text_completion
    model: str  # what the client calls it
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    sampling: dict[str, Any]
    max_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    n: int
    logprobs: int | None
    echo: bool = False
    token_ids: bool
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str


def parse_chat(data: bytes) -> Ask:
    """The body of /v1/chat/completions. Raises ApiError (400)."""
    body = _convert(_object(data), ChatBody)
    top = body.top_logprobs
    if top is not None:
        within("top_logprobs", top, 0, MAX_LOGPROBS)
        if top and not body.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _ask(
        body,
        operation="chat",
        messages=_messages(body.messages),
        max_tokens=_max_tokens(limit, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"),
        logprobs=(top or 0) if body.logprobs else None,
    )


def parse_completion(data: bytes) -> Ask:
    """The body of /v1/completions. Raises ApiError (400)."""
    body = _convert(_object(data), CompletionBody)
    if body.logprobs is not None:
        within("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = parse_prompts(body.prompt)
    if len(prompts) * (body.n or 1) > MAX_PROMPTS:
        raise invalid(f"prompt times n is more than {MAX_PROMPTS} choices", "prompt")
    return _ask(
        body,
        operation="text_completion",
        prompts=prompts,
        max_tokens=_max_tokens(limit, "max_tokens"),
        logprobs=body.logprobs,
        echo=bool(body.echo),
    )


def parse_object(data: bytes, allowed: dict[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """A small body (tokenize, control): an object with `allowed` keys of the given types; null is absent."""
    body = {key: value for key, value in _object(data).items() if value is not None}
    for key, value in body.items():
        if key not in allowed:
            raise invalid(f"unknown parameter: {_shown(key)}", _shown(key), "unknown_parameter")
        if not isinstance(value, allowed[key]) or (isinstance(value, bool) and allowed[key] is not bool):
            raise invalid(f"{key} has the wrong type", key, "invalid_type")
    return body


def parse_messages(value: list[Any]) -> tuple[dict[str, str], ...]:
    """Chat messages of a body that was read by `parse_object`."""
    if not all(isinstance(message, dict) for message in value):
        raise invalid("messages must be objects", "messages", "invalid_type")
    return _messages(value)


def parse_prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """A prompt in any of its four shapes, as a tuple of prompts. Raises ApiError (400)."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = [prompt] if _is_token(prompt[0]) else prompt
    else:
        raise invalid("prompt must be a non-empty string, or list of strings, token ids or lists of them", "prompt")
    checked: list[str | tuple[int, ...]] = []
    for one in prompts:
        if isinstance(one, str) and one:
            checked.append(one)
        elif isinstance(one, list) and one and all(map(_is_token, one)):
            checked.append(tuple(one))
        elif one in ("", []):
            raise invalid("prompt is empty", "prompt", "empty_prompt")
        else:
            raise invalid("prompt mixes types: give strings, or lists of token ids", "prompt", "invalid_type")
    return tuple(checked)


def _ask(body: Common, *, max_tokens: int | None, **route: Any) -> Ask:
    """What is common to both routes, checked."""
    sampling = check_bounds(body)
    n = within("n", body.n if body.n is not None else 1, 1, MAX_CHOICES)
    if max_tokens is not None and sampling.get("min_tokens", 0) > max_tokens:
        raise invalid("min_tokens is more than max_tokens", "min_tokens")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    if body.return_token_ids and body.stream:
        raise invalid("return_token_ids is not supported with stream: true", "return_token_ids")
    return Ask(
        model=body.model,
        sampling=sampling,
        max_tokens=max_tokens,
        seed=None if body.seed is None else within("seed", body.seed, -(2**63), 2**63 - 1),
        stop=check_stop(body.stop),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(within("stop_token_ids", t, 0, 2**31 - 1) for t in body.stop_token_ids or ()),
        logit_bias=logit_bias(body.logit_bias),
        n=n,
        token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        priority=within("priority", body.priority or 0, -(2**31), 2**31 - 1),
        cache_salt=body.cache_salt or "",
        **route,
    )


def _max_tokens(value: int | None, name: str) -> int | None:
    return None if value is None else within(name, value, 1, 2**31 - 1)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _shown(name: str) -> str:
    """A client's own key, short and printable enough for a message."""
    return "".join(c if c.isprintable() else "?" for c in name[:64])


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_type")
    return body


B = TypeVar("B", bound=Common)


def _convert(body: dict[str, Any], kind: type[B]) -> B:
    known = kind.__struct_fields__
    kept = {}
    for key, value in body.items():
        if key in known:
            if value is not None:
                kept[key] = value
        elif key not in _DECLINED:
            raise invalid(f"unknown parameter: {_shown(key)}", _shown(key), "unknown_parameter")
        elif value is not None and value not in _DECLINED[key]:
            raise invalid(f"{key} is not supported", key, "unsupported_parameter")
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def _named(text: str) -> ApiError:
    """An ApiError for msgspec's message, which ends in '- at `$.path`' or names a missing field."""
    what, _, path = text.partition(" - at `$.")
    if path:
        param = path.rstrip("`")
        return invalid(f"{param}: {what}", param, "invalid_type")
    if "required field" in what:
        param = what.split("`")[1]
        return invalid(f"missing required parameter: {param}", param, "missing_required_parameter")
    return invalid(what, code="invalid_type")


_ROLES: Final = ("system", "user", "assistant", "developer")
_MESSAGE_KEYS: Final = ("role", "content", "name")


def _messages(messages: list[dict[str, Any]]) -> tuple[dict[str, str], ...]:
    if not messages:
        raise invalid("messages is empty", "messages", "empty_prompt")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(at: str, message: dict[str, Any]) -> dict[str, str]:
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value not in (None, [], {}):
            name = f"{at}.{_shown(key)}"
            raise invalid(f"{name} is not supported", name, "unsupported_parameter")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{at}.role must be one of {', '.join(_ROLES)}", f"{at}.role")
    checked = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{at}.content", message.get("content")),
    }
    author = message.get("name")
    if author is not None:
        if not isinstance(author, str):
            raise invalid(f"{at}.name must be a string", f"{at}.name", "invalid_type")
        checked["name"] = author
    return checked


def _content(at: str, content: Any) -> str:
    """A string, or the text of parts of type 'text' one after another."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"{at} must be a string or a list of text parts", at, "invalid_type")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise invalid(f"{at}[{i}].type: only text parts are supported", f"{at}[{i}].type", "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{at}[{i}].text must be a string", f"{at}[{i}].text", "invalid_type")
        texts.append(part["text"])
    return "".join(texts)
