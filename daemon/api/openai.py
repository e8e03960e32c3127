"""The routes of the OpenAI API, and /tokenize and /detokenize beside it. Handlers are thin: generate does the work.

Must not know sockets, the engine process or telemetry's sinks. Enter at `routes`.
"""

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from daemon.api.body import read_body
from daemon.api.errors import ApiError, from_inferd, invalid
from daemon.api.generate import Generation
from daemon.api.kitchen import Kitchen
from daemon.api.prompt import encode_chat, encode_prompt
from daemon.api.record import Trace, log_ids
from daemon.api.schema import Ask, parse_chat, parse_completion, parse_messages, parse_object, parse_prompts
from engine.errors import InferdError

log = logging.getLogger("inferd.api")

REQUEST_ID = web.RequestKey("request_id", str)
TRACE = web.RequestKey("trace", Trace)
_MOST_TOKENS = 2**20  # of one /detokenize


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=error.headers()
    )


def internal_error(request: web.Request) -> ApiError:
    """The error that a client is told of when the fault is ours. The log has the rest."""
    trace = request.get(TRACE)
    ids = {"request_id": request[REQUEST_ID]} if trace is None else log_ids(request[REQUEST_ID], trace)
    log.exception("a handler failed", extra=ids)
    return ApiError(500, "internal error: see the daemon's log", code="internal_error")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class OpenAi:
    """Handlers over a Kitchen."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat", parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "text_completion", parse_completion)

    async def models(self, request: web.Request) -> web.Response:
        self._kitchen.authorize(request)
        return _json({"object": "list", "data": [self._model(name) for name in self._kitchen.served.names]})

    async def model(self, request: web.Request) -> web.Response:
        self._kitchen.authorize(request)
        name = request.match_info["model"]
        self._kitchen.served.check(name)
        return _json(self._model(name))

    async def tokenize(self, request: web.Request) -> web.Response:
        """{"prompt"} or {"messages"} → tokens, count, max_model_len."""
        self._kitchen.authorize(request)
        body = parse_object(
            await read_body(request),
            {"model": str, "prompt": str, "messages": list, "add_special_tokens": bool, "add_generation_prompt": bool},
        )
        self._check_model(body.get("model"))
        for name in ("add_special_tokens", "add_generation_prompt"):
            if body.get(name) is False:
                raise invalid(f"{name}: false is not supported", name, "unsupported_parameter")
        if ("prompt" in body) == ("messages" in body):
            raise invalid("give either prompt or messages", "prompt")
        text = self._kitchen.text
        try:
            if "messages" in body:
                tokens = await encode_chat(parse_messages(body["messages"]), text)
            else:
                tokens = await encode_prompt(body["prompt"], text) if body["prompt"] else ()
        except InferdError as error:
            raise from_inferd(error) from error
        limits = self._kitchen.port.view().limits
        longest = limits.context_limit if limits else None
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": longest})

    async def detokenize(self, request: web.Request) -> web.Response:
        """{"tokens"} → prompt."""
        self._kitchen.authorize(request)
        body = parse_object(await read_body(request), {"model": str, "tokens": list})
        self._check_model(body.get("model"))
        tokens = body.get("tokens")
        if tokens is None:
            raise invalid("missing required parameter: tokens", "tokens", "missing_required_parameter")
        if len(tokens) > _MOST_TOKENS:
            raise invalid(f"more than {_MOST_TOKENS} tokens", "tokens")
        if not tokens:
            return _json({"prompt": ""})
        if not isinstance(tokens[0], int):
            raise invalid("tokens must be token ids", "tokens", "invalid_type")
        (prompt,) = parse_prompts(tokens)
        return _json({"prompt": self._kitchen.text.decode(await encode_prompt(prompt, self._kitchen.text))})

    async def _generate(
        self, request: web.Request, operation: str, parse: Callable[[bytes], Ask]
    ) -> web.StreamResponse:
        arrival_ns = time.monotonic_ns()
        trace = request[TRACE] = Trace.begin(
            request.headers.get("traceparent"), self._kitchen.sampled, request.headers.get("tracestate")
        )
        generation = Generation(self._kitchen, operation, parse, request[REQUEST_ID], arrival_ns, trace)
        try:
            return await generation.serve(request)
        except ApiError as error:
            refusal = error
        except Exception:
            if generation.answering:
                raise
            refusal = internal_error(request)
        response = error_response(refusal)
        try:
            with contextlib.suppress(ConnectionResetError):  # it left without waiting for the refusal
                await response.prepare(request)
                await response.write_eof()
        finally:
            generation.refused(refusal)
        return response

    def _check_model(self, model: str | None) -> None:
        if model is not None:
            self._kitchen.served.check(model)

    def _model(self, name: str) -> dict[str, object]:
        served = self._kitchen.served
        limits = self._kitchen.port.view().limits
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "inferd",
            "root": served.names[0],
            "max_model_len": limits.context_limit if limits else None,
        }
