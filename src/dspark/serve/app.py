"""The app: routes of the OpenAI-compatible API, and those that operators need.
It must never decide how tokens are made: it reads requests, asks the service, and writes answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dspark import __version__
from dspark.observe.metrics import HttpCounts
from dspark.observe.prometheus import Exporter
from dspark.params import SamplingParams
from dspark.serve.answers import Choice, Head, echo_of, speculation_of, usage_of
from dspark.serve.errors import Refusal, askers_fault
from dspark.serve.http import Door, EventStream, Json, read_body, refused, unless_gone
from dspark.serve.live import state
from dspark.serve.parts import Parts
from dspark.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    Model,
    TokenizeRequest,
    parse,
)
from dspark.serve.service import Service
from dspark.types import Request as EngineRequest
from dspark.types import RequestOutput

REQUESTS: Sequence[type[Model]] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
PAGE_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(kw_only=True)
class Ask:
    """A request on its way: what came, what the engine is asked, and how the answer is written."""

    body: Generation
    head: Head
    requests: list[EngineRequest]
    choices: list[Choice]
    echo: bool = False
    only_prompt: bool = False

    @property
    def num_each(self) -> int:
        """Answers a prompt."""
        return self.requests[0].params.n


class Api:
    """The routes over one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.config = service.config
        self.http = HttpCounts()
        info = service.llm.info()
        facts = {"block_size": info["page_size"], "num_gpu_blocks": sum(info["cache_pages"]), "dtype": info["dtype"]}
        facts |= {"max_model_len": info["max_context"], "device": info["device"], "path": info["path"]}
        kinds = ("draft", "policy", "num_speculative_tokens", "objective")
        self.exporter = Exporter(
            service.metrics,
            self.http,
            model_name=service.names[0],
            facts=facts,
            speculation={"method": service.llm.speculation.method} | {kind: info[kind] for kind in kinds},
        )

    # -- OpenAI's

    async def models(self) -> Response:
        """What is served."""
        llm, created = self.service.llm, self.service.created
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "dspark",
                "root": llm.info()["model"],
                "max_model_len": llm.engine.max_context,
            }
            for name in self.service.names
        ]
        return Json({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """One of what is served."""
        self.service.check_model(name)
        return Json({"id": name, "object": "model", "created": self.service.created, "owned_by": "dspark"})

    async def chat(self, request: Request) -> Response:
        """A conversation goes on."""
        return await self._answer(request, ChatRequest, self._ask_chat)

    async def complete(self, request: Request) -> Response:
        """A text goes on."""
        return await self._answer(request, CompletionRequest, self._ask_completion)

    async def _answer(
        self,
        request: Request,
        kind: type[Generation],
        ask_for: Callable[[Any], Coroutine[Any, Any, Ask]],
    ) -> Response:
        body: Generation = await self._read(request, kind)
        self.service.check_model(body.model)
        self.service.admit(body.n or 1)
        with askers_fault():
            ask = await ask_for(body)
        told = request.scope["dspark"]
        told["request"] = ask.head.id
        if not body.stream:
            return Json(await unless_gone(request.receive, self._whole(ask, told)))
        events = self._events(ask, told)
        first = await unless_gone(request.receive, _first(events))
        return EventStream(first, events, timeout=self.config.send_timeout)

    async def _ask_chat(self, body: ChatRequest) -> Ask:
        config = self.config
        params = body.params(tool_style=self.service.style, reasoning_end=config.reasoning_end)
        head = Head.of("chat.completion", body.model or self.service.names[0])
        ids = await self.service.chat_ids(body.template_messages(), body.template_values())
        requests = await self.service.make([ids], params, priority=body.priority, request_id=head.id)
        style = self.service.style if body.calls_tools else None
        choices = [
            self._choice(i, body, params, is_chat=True, parts=Parts(style=style, reasoning_end=config.reasoning_end))
            for i in range(params.n)
        ]
        return Ask(body=body, head=head, requests=requests, choices=choices)

    async def _ask_completion(self, body: CompletionRequest) -> Ask:
        params = body.params()
        head = Head.of("text_completion", body.model or self.service.names[0])
        prompts = body.prompts()
        if not body.add_special_tokens:
            prompts = [
                await self.service.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
        requests = await self.service.make(prompts, params, priority=body.priority, request_id=head.id)
        choices = [self._choice(i, body, params, parts=Parts()) for i in range(len(requests) * params.n)]
        return Ask(
            body=body, head=head, requests=requests, choices=choices, echo=body.echo, only_prompt=body.only_prompt
        )

    def _choice(
        self, index: int, body: Generation, params: SamplingParams, *, parts: Parts, is_chat: bool = False
    ) -> Choice:
        return Choice(
            index=index,
            parts=parts,
            words=self.service.llm.tokenizer,
            is_chat=is_chat,
            reports_logprobs=params.logprobs is not None,
            num_top=params.logprobs or 0,
            reports_sources=body.token_sources,
        )

    async def _whole(self, ask: Ask, told: dict[str, Any]) -> dict[str, Any]:
        """The response, when all of it is there."""
        outputs: dict[int, RequestOutput] = {}
        async for place, output in self.service.answers(ask.requests):
            outputs[place] = output
        finished = [outputs[place] for place in range(len(ask.requests))]
        choices = []
        for place, output in enumerate(finished):
            echoed = self._echo(ask, output)
            for completion in output.outputs:
                _check(completion.finish_reason, completion.stop_reason)
                choice = ask.choices[place * ask.num_each + completion.index]
                choice.base = len(echoed["text"]) if echoed else 0
                choices.append(choice.whole(_cut(completion, ask), echoed=echoed))
                if ask.body.prompt_logprobs is not None and not choice.is_chat:
                    choices[-1]["prompt_logprobs"] = _prompt_entries(output)
        usage = usage_of(finished, only_prompt=ask.only_prompt)
        told |= _facts(usage, finished)
        rest: dict[str, Any] = {"usage": usage, **self._metrics(ask, finished)}
        if ask.body.prompt_logprobs is not None and ask.choices[0].is_chat:
            rest["prompt_logprobs"] = _prompt_entries(finished[0])
        return ask.head.response(choices, **rest)

    async def _events(self, ask: Ask, told: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The response, as it grows."""
        outputs: dict[int, RequestOutput] = {}
        options = ask.body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        async for place, output in self.service.answers(ask.requests):
            outputs[place] = output
            echoed = self._echo(ask, output) if ask.echo else None
            for completion in output.outputs:
                choice = ask.choices[place * ask.num_each + completion.index]
                if completion.finish_reason is not None and not choice.ended:
                    _check(completion.finish_reason, completion.stop_reason)
                choice.base = len(echoed["text"]) if echoed else 0
                if (piece := choice.piece(_cut(completion, ask), echoed=echoed)) is not None:
                    told_now = list(outputs.values())
                    extra = {"usage": usage_of(told_now, only_prompt=ask.only_prompt)} if continuous else {}
                    yield ask.head.chunk([piece], **extra)
        finished = [outputs[place] for place in range(len(ask.requests))]
        usage = usage_of(finished, only_prompt=ask.only_prompt)
        told |= _facts(usage, finished)
        metrics = self._metrics(ask, finished)
        if ask.body.wants_usage or metrics:
            yield ask.head.chunk([], **({"usage": usage} if ask.body.wants_usage else {}), **metrics)

    def _echo(self, ask: Ask, output: RequestOutput) -> dict[str, Any] | None:
        if not ask.echo:
            return None
        return echo_of(self.service.llm.tokenizer, output, logprobs=output.prompt_logprobs is not None)

    def _metrics(self, ask: Ask, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        report = self.config.per_request_spec_decode_metrics
        if report == "none" and not ask.body.include_metrics:
            return {}
        return {"metrics": speculation_of(outputs, detailed=report == "detailed")}

    async def _read(self, request: Request, kind: type[Model]) -> Any:
        config = self.config
        body = await read_body(request, max_bytes=config.max_request_bytes, timeout=config.body_timeout)
        with askers_fault():
            return parse(kind, body)

    # -- vLLM's

    async def tokenize(self, request: Request) -> Response:
        """Ids of a text or of a conversation."""
        body: TokenizeRequest = await self._read(request, TokenizeRequest)
        self.service.check_model(body.model)
        with askers_fault():
            body.check()
            if body.prompt is not None:
                ids = await self.service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
            else:
                chat = parse_messages(body)
                ids = await self.service.chat_ids(chat.template_messages(), chat.template_values())
        words = self.service.llm.tokenizer
        strings = [words.token_bytes(i).decode("utf-8", "replace") for i in ids] if body.return_token_strs else None
        found = {"count": len(ids), "max_model_len": self.service.llm.engine.max_context, "tokens": ids}
        return Json(found | {"token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        body: DetokenizeRequest = await self._read(request, DetokenizeRequest)
        self.service.check_model(body.model)
        words = self.service.llm.tokenizer
        if not all(0 <= token < words.num_tokens for token in body.tokens):
            raise Refusal(
                400, f"tokens has an id outside 0..{words.num_tokens - 1}: check the tokenizer", param="tokens"
            )
        text = await self.service.engine.read(lambda: words.decode(body.tokens, skip_special_tokens=False))
        return Json({"prompt": text})

    # -- operators'

    async def health(self) -> Response:
        """200 while answers can be given."""
        return Response(status_code=200 if self.service.engine.alive and not self.service.draining else 503)

    async def version(self) -> Response:
        """Of dspark."""
        return Json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        body, content_type = self.exporter.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def live(self) -> Response:
        """What the page shows."""
        return Json(state(self.service))

    async def page(self) -> Response:
        """The page."""
        return _file("index.html", "text/html")

    async def page_file(self, name: str) -> Response:
        """What the page is made of."""
        if name not in PAGE_FILES:
            raise Refusal(404, f"there is no {name[:80]!r}")
        return _file(name, PAGE_FILES[name])


def create_app(service: Service) -> FastAPI:
    """All routes, with errors in OpenAI's shape."""
    api = Api(service)
    app = FastAPI(title="dspark", version=__version__, docs_url=None, redoc_url=None)
    add = app.add_api_route
    add("/v1/models", api.models, methods=["GET"])
    add("/v1/models/{name:path}", api.model, methods=["GET"], responses=_errors(404))
    for path, handler, kind in (
        ("/v1/chat/completions", api.chat, ChatRequest),
        ("/v1/completions", api.complete, CompletionRequest),
        ("/tokenize", api.tokenize, TokenizeRequest),
        ("/detokenize", api.detokenize, DetokenizeRequest),
    ):
        add(path, handler, methods=["POST"], openapi_extra=_takes(kind), responses=_errors(400, 401, 404, 413, 429))
    for path, get in (("/health", api.health), ("/version", api.version), ("/metrics", api.metrics)):
        add(path, get, methods=["GET"])
    if service.config.page:
        add("/live", api.live, methods=["GET"])
        add("/", api.page, methods=["GET"], include_in_schema=False)
        add("/page/{name}", api.page_file, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(Door, keys=service.config.api_key, counts=api.http)
    if service.config.allowed_origins:  # around the door, so that a page can read that its key is wrong
        app.add_middleware(
            CORSMiddleware, allow_origins=list(service.config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _describe(app)
    return app


def parse_messages(body: TokenizeRequest) -> ChatRequest:
    """A conversation to be read and not answered."""
    values = {"messages": body.messages, "add_generation_prompt": body.add_generation_prompt}
    if not body.messages:
        raise ValueError("messages is empty: give at least one")
    return ChatRequest.model_validate(values)


async def _first(events: AsyncIterator[Any]) -> list[Any]:
    """The first event, when there is one."""
    async for event in events:
        return [event]
    return []


async def _on_refusal(request: Request, error: Any) -> Response:
    return refused(error)


async def _on_http_error(request: Request, error: Any) -> Response:
    texts = {404: f"there is no {request.url.path[:200]!r} here", 405: f"{request.method} is not for this route"}
    response = refused(Refusal(error.status_code, texts.get(error.status_code, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


def _check(reason: str | None, cause: int | str | None) -> None:
    if reason == "error":
        raise Refusal(500, f"the answer failed: {cause}", code="engine_error")


def _cut(completion: Any, ask: Ask) -> Any:
    """Without the token that is asked only so that the prompt is scored."""
    if not ask.only_prompt:
        return completion
    completion.text, completion.token_ids, completion.logprobs = "", [], []
    completion.text_ends, completion.origins = [], []
    return completion


def _facts(usage: Mapping[str, Any], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """For the log."""
    reasons = sorted({str(completion.finish_reason) for output in outputs for completion in output.outputs})
    return {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"]} | {
        "finish_reason": ",".join(reasons)
    }


def _prompt_entries(output: RequestOutput) -> list[dict[str, Any] | None]:
    """As vLLM writes them: by token id; None for the first token, which nothing foretold."""
    return [
        None if entry is None else {str(x.token_id): {"logprob": x.logprob, "rank": x.rank} for x in entry}
        for entry in output.prompt_logprobs or []
    ]


def _file(name: str, media_type: str) -> Response:
    body = resources.files("dspark.serve").joinpath("page", name).read_bytes()
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(body, media_type=media_type, headers=headers)


def _takes(kind: type[Model]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": "error"} for status in statuses}


def _describe(app: FastAPI) -> None:
    """Add the requests to the OpenAPI document: bodies are parsed here, not by FastAPI, which would not refuse what a
    strict reader does."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in REQUESTS], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
