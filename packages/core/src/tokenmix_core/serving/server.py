"""An OpenAI-compatible HTTP server for the engine: completions, chat completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from tokenmix_core.serving.engine import Engine
from tokenmix_core.serving.protocol import ChatRequest, CompletionRequest, Request
from tokenmix_core.serving.sampling import Sampling
from tokenmix_core.serving.text import Detokenizer

# maximum bytes of a request's body
_MOST_BYTES = 16 << 20
# seconds between two checks of whether the client is still connected
_CHECK_EVERY = 0.5


@dataclasses.dataclass
class Choice:
    """One of the answers to a request, while tokens are being generated.

    Attributes:
        index: index of the answer in the response.
        prompt: index of the answer's prompt in the request.
        sampling: settings of the answer, and the log-probabilities of its tokens.
        detokenizer: converts the answer's tokens to text.
        name: id of the answer's request in the engine; empty before the request is added.
        text: text of all tokens so far.
        tokens: ids of the tokens generated so far.
        reason: "stop" or "length" once the answer has ended, None before.
    """

    index: int
    prompt: int
    sampling: Sampling
    detokenizer: Detokenizer
    name: str = ""
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None


def build_app(engine: Engine, tokenizer: Any, name: str, max_waiting: int = 1 << 14) -> FastAPI:
    """Return the FastAPI application, which starts and stops the engine.

    Args:
        engine: the engine that runs the requests.
        tokenizer: the model's tokenizer.
        name: the name of the model in requests.
        max_waiting: maximum number of answers that wait or run; further requests are refused.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with engine:
            yield

    app, started = FastAPI(title=name, lifespan=lifespan), time.time()
    app.add_middleware(_LimitedBody)
    answers = _Answers(engine, tokenizer, name, max_waiting)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(x) for x in first["loc"][1:2])
        message = str(first["msg"]).removeprefix("Value error, ")
        return _error(400, f"{field}: {message}" if field else message)

    @app.exception_handler(AnyHTTPException)
    async def refused(request: HTTPRequest, error: AnyHTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(ValueError)
    async def unfit(request: HTTPRequest, error: ValueError) -> JSONResponse:
        return _error(400, str(error))

    @app.exception_handler(Exception)
    async def failed(request: HTTPRequest, error: Exception) -> JSONResponse:
        return _error(500, "the server failed to answer this request: see its log")

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: HTTPRequest) -> Response:
        prompts = [answers.encode(x) if isinstance(x, str) else x for x in body.prompts]
        if not prompts:
            raise HTTPException(400, "prompt: give at least one")
        return await answers.respond(request, body, prompts, body.max_tokens, body.logprobs, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: HTTPRequest) -> Response:
        if getattr(tokenizer, "chat_template", None) is None:
            raise HTTPException(400, "the model's tokenizer has no chat template: use /v1/completions")
        try:
            prompt = tokenizer.apply_chat_template(body.messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:
            # a chat template is a program by the model's author, and may raise errors of any type
            raise HTTPException(400, f"messages do not fit the chat template: {error}") from error
        limit = body.max_completion_tokens or body.max_tokens
        return await answers.respond(
            request, body, [prompt], limit, body.top_logprobs if body.logprobs else None, chat=True
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": int(started), "owned_by": "tokenmix"}
        return {"object": "list", "data": [{**model, "max_model_len": engine.max_tokens}]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        answers.check_name(model)
        return (await models())["data"][0]

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.running else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        counts = engine.counts | engine.prefix_counts
        values = {f"{key}_total": ("counter", value) for key, value in counts.items()}
        gauges = {"requests_active": engine.active, "state_bytes": engine.state_bytes}
        gauges["prefix_bytes"] = engine.prefix_bytes
        values |= {key: ("gauge", value) for key, value in gauges.items()}
        lines = [f"# TYPE tokenmix_{key} {kind}\ntokenmix_{key} {value}" for key, (kind, value) in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    return app


class _LimitedBody:
    """Refuses request bodies that are large or do not state their length, before they are read."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with an error if the body is too large or of unknown length, else call the application."""
        refusal = None
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit():
                refusal = _error(411, "the request needs a Content-Length")
            elif int(length) > _MOST_BYTES:
                refusal = _error(413, f"the body has {int(length):,} bytes, at most {_MOST_BYTES:,} are accepted")
        await (self.app if refusal is None else refusal)(scope, receive, send)


class _Answers:
    """Runs requests on the engine, and writes answers in OpenAI's format."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str, max_waiting: int):
        self.engine, self.tokenizer, self.name, self.max_waiting = engine, tokenizer, name, max_waiting
        self.ends = sorted({x for x in (tokenizer.eos_token_id, *_end_tokens(engine.model)) if x is not None})

    def check_name(self, name: str | None) -> None:
        """Raise the error "not found" unless `name`, a request's model, is the served model or None."""
        if name not in (None, self.name):
            raise HTTPException(404, f"the model {name!r} is not served, {self.name!r} is")

    def check_mode(self, body: Request) -> dict[str, Any]:
        """Check the model's name; return the mixers' inputs: `mode`, if the body or the name (`NAME:MODE`) has one.

        Raises:
            HTTPException: a model that is not served, or two modes.
        """
        mode, own = body.mode, f"{self.name}:"
        if body.model and body.model.startswith(own) and "mode" in self.engine.model.input_takers:
            if mode is not None:
                raise HTTPException(400, "give mode in the body or behind the model's name, not both")
            mode = body.model.removeprefix(own)
        else:
            self.check_name(body.model)
        return {} if mode is None else {"mode": mode}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        if any("\ud800" <= x <= "\udfff" for x in text):
            raise HTTPException(400, "prompt: the text has unpaired surrogates, which are no characters")
        return self.tokenizer(text)["input_ids"]

    async def respond(
        self,
        http: HTTPRequest,
        body: Request,
        prompts: list[list[int]],
        limit: int | None,
        logprobs: int | None,
        *,
        chat: bool,
    ) -> Response:
        """Run a request, and return the answer as JSON or as a stream of events."""
        inputs = self.check_mode(body)
        count, active, most = len(prompts) * body.n, self.engine.active, self.max_waiting
        if count > most:
            raise HTTPException(400, f"the request asks for {count:,} answers, at most {most:,} may wait or run")
        if active + count > most:
            raise HTTPException(429, f"{active:,} answers wait or run, at most {most:,} may: try again later")
        if not self.engine.running:
            raise HTTPException(503, "the engine has stopped")
        queue: asyncio.Queue[tuple[Choice, Any]] = asyncio.Queue()
        choices: list[Choice] = []
        try:
            for i, prompt in enumerate(prompts):
                for copy in range(body.n):
                    seed = None if body.seed is None else body.seed + copy
                    sampling = Sampling(body.temperature, body.top_k, body.top_p, seed, logprobs)
                    choice = Choice(len(choices), i, sampling, Detokenizer(self.tokenizer, body.stops))
                    choices.append(choice)
                    tokens = self.engine.max_tokens - len(prompt) if limit is None else limit
                    choice.name = self.engine.add(
                        prompt,
                        tokens,
                        sampling,
                        lambda output, choice=choice: queue.put_nowait((choice, output)),
                        end_tokens=self.ends,
                        inputs=inputs,
                    )
        except Exception:
            self._cancel(choices)
            raise
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": ("chat.completion" if chat else "text_completion"),
            "created": int(time.time()),
            "model": self.name,
        }
        used = sum(map(len, prompts))
        steps = self._steps(http, queue, choices)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(
                self._events(head, steps, choices, used, chat, usage), media_type="text/event-stream"
            )
        async with aclosing(steps):
            async for _ in steps:
                pass
        full = [_whole(x, self.tokenizer, chat) for x in choices]
        return JSONResponse({**head, "choices": full, "usage": _usage(used, choices)})

    async def _steps(
        self, http: HTTPRequest, queue: asyncio.Queue, choices: list[Choice]
    ) -> AsyncGenerator[tuple[Choice, str, int], None]:
        """Yield, for each output of the engine, its answer, the new text and the number of the answer's earlier tokens.

        At the end, also if the client disconnects, cancel the requests that still run.
        """
        left, checked = len(choices), time.monotonic()
        try:
            while left:
                output = None
                with suppress(asyncio.TimeoutError):
                    choice, output = await asyncio.wait_for(queue.get(), _CHECK_EVERY)
                if time.monotonic() > checked + _CHECK_EVERY:
                    checked = time.monotonic()
                    if await http.is_disconnected():
                        return
                    if output is None and not self.engine.running:
                        raise HTTPException(503, "the engine has stopped")
                if output is None or choice.reason is not None:
                    continue
                if output.error is not None:
                    raise HTTPException(500, output.error)
                before, ended = len(choice.tokens), output.is_finished()
                choice.tokens = list(output.generated_tokens)
                new = choice.detokenizer.add(choice.tokens, ended=ended)
                choice.text += new
                if choice.detokenizer.stopped:
                    choice.reason = "stop"
                    self.engine.cancel(choice.name)
                elif ended:
                    choice.reason = "stop" if choice.tokens and choice.tokens[-1] in self.ends else "length"
                left -= choice.reason is not None
                yield choice, new, before
        finally:
            self._cancel(choices)

    async def _events(
        self, head: dict[str, Any], steps: Any, choices: list[Choice], used: int, chat: bool, usage: bool
    ) -> AsyncIterator[str]:
        """Yield the lines of a stream of server-sent events for the answers."""
        try:
            if chat:
                head = {**head, "object": "chat.completion.chunk"}
                for x in choices:
                    first = {"role": "assistant", "content": ""}
                    yield _event({**head, "choices": [{"index": x.index, "delta": first, "finish_reason": None}]})
            async with aclosing(steps):
                async for choice, text, before in steps:
                    logs = _logprobs(choice, self.tokenizer, chat, before)
                    part: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason, "logprobs": logs}
                    part |= {"delta": {"content": text}} if chat else {"text": text}
                    if text or choice.reason or logs:
                        yield _event({**head, "choices": [part]})
            if usage:
                yield _event({**head, "choices": [], "usage": _usage(used, choices)})
        except HTTPException as error:
            yield _event(_body(error.status_code, str(error.detail)))
        finally:
            # cancel here too, because a client may disconnect before the first step
            self._cancel(choices)
        yield "data: [DONE]\n\n"

    def _cancel(self, choices: list[Choice]) -> None:
        for x in choices:
            self.engine.cancel(x.name)


def _end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def _whole(choice: Choice, tokenizer: Any, chat: bool) -> dict[str, Any]:
    logs = _logprobs(choice, tokenizer, chat, 0)
    answer: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason, "logprobs": logs}
    if chat:
        return {**answer, "message": {"role": "assistant", "content": choice.text}}
    return {**answer, "text": choice.text}


def _logprobs(choice: Choice, tokenizer: Any, chat: bool, start: int) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer's tokens from `start` on, in the format of completions or of `chat`."""
    if choice.sampling.logprobs is None:
        return None
    tokens, chosen = choice.tokens[start:], choice.sampling.chosen[start : len(choice.tokens)]
    texts = [tokenizer.decode([x]) for x in tokens]
    offsets = itertools.accumulate(map(len, texts), initial=len(tokenizer.decode(choice.tokens[:start])))
    if chat:
        return {
            "content": [
                {**_token(text, value), "top_logprobs": [_token(tokenizer.decode([i]), p) for i, p in likely]}
                for text, (value, likely) in zip(texts, chosen, strict=False)
            ]
        }
    return {
        "tokens": texts,
        "token_logprobs": [value for value, _ in chosen],
        "top_logprobs": [{tokenizer.decode([i]): p for i, p in likely} for _, likely in chosen],
        "text_offset": [*offsets][:-1],
    }


def _token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _usage(prompt: int, choices: list[Choice]) -> dict[str, Any]:
    generated = sum(len(x.tokens) for x in choices)
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    # count each prompt's tokens once, even if the prompt has several answers
    cached = sum({x.prompt: x.sampling.cached_tokens for x in reversed(choices)}.values())
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(_body(status, message), status)
