"""From a generation request's body to the prompts, choices and limits it asks for.

Internal request ids are made here as vLLM makes them: for a client's id ``rid``,
``cmpl-rid-0``, ``cmpl-rid-1``, … per prompt of a completion, ``chatcmpl-rid`` for a chat,
``generate-tokens-rid`` for token-in token-out. Only those can be aborted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet.sim.errors import BadRequest, NotFound
from fleet.sim.generation import encode
from fleet.sim.http import field, invalid
from fleet.sim.scheduler import SimRequest

if TYPE_CHECKING:
    from fleet.sim.engine import SimEngine

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """One HTTP request for generation: its choices, and how the answer is to look.

    `kind` is ``text``, ``chat`` or ``tokens``.
    """

    kind: str
    answer_id: str
    model: str
    batch: list[SimRequest]
    stream: bool
    logprobs: bool
    include_usage: bool
    return_token_ids: bool
    prompt_tokens: int

    @property
    def aborted(self) -> bool:
        """Whether any choice was aborted."""
        return any(request.aborted for request in self.batch)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all choices."""
        return sum(len(request.token_ids) for request in self.batch)


def parse_completion(body: Mapping[str, Any], rid: str, engine: "SimEngine") -> Job:
    """The job of a /v1/completions body. Raises `BadRequest` and `NotFound`."""
    prompts = _prompts(body)
    ids = [f"cmpl-{rid}-{number}" for number in range(len(prompts))]
    return _job("text", f"cmpl-{rid}", body, list(zip(ids, prompts, strict=True)), engine)


def parse_chat(body: Mapping[str, Any], rid: str, engine: "SimEngine") -> Job:
    """The job of a /v1/chat/completions body. Raises `BadRequest` and `NotFound`."""
    prompt = encode(chat_text(field(body, "messages", list)))
    return _job("chat", f"chatcmpl-{rid}", body, [(f"chatcmpl-{rid}", prompt)], engine)


def parse_generate(body: Mapping[str, Any], rid: str, engine: "SimEngine") -> Job:
    """The job of an /inference/v1/generate body. Raises `BadRequest` and `NotFound`."""
    tokens = field(body, "token_ids", list)
    sampling = field(body, "sampling_params", dict)
    request_id = f"generate-tokens-{rid}"
    merged = {**sampling, "model": body.get("model"), "stream": body.get("stream")}
    return _job("tokens", request_id, merged, [(request_id, tokens)], engine)


def chat_text(messages: Sequence[Any]) -> str:
    """The text that the simulated chat template makes of a conversation."""
    turns = [f"<|{_role(message)}|>{_content(message)}" for message in messages]
    return "".join([*turns, "<|assistant|>"])


def _role(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid("missing", ["body", "messages", "role"], "Field required")
    return message["role"]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _prompts(body: Mapping[str, Any]) -> list[list[int]]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [prompt]
        return [encode(item) if isinstance(item, str) else list(item) for item in prompt]
    raise BadRequest(
        "Either prompt or prompt_embeds must be provided and non-empty.", kind="BadRequestError"
    )


def _job(
    kind: str,
    answer_id: str,
    body: Mapping[str, Any],
    prompts: list[tuple[str, list[int]]],
    engine: "SimEngine",
) -> Job:
    model = check_model(body.get("model"), engine)
    limit = _max_tokens(body)
    for _, tokens in prompts:
        _check_length(len(tokens), limit, engine.options.max_model_len)
    choices = _choices(body)
    options = body.get("stream_options") or {}
    return Job(
        kind=kind,
        answer_id=answer_id,
        model=model,
        batch=[
            SimRequest(rid, tokens, limit, choice)
            for rid, tokens in prompts
            for choice in range(choices)
        ],
        stream=bool(body.get("stream")),
        logprobs=body.get("logprobs") not in (None, False),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")),
        prompt_tokens=sum(len(tokens) for _, tokens in prompts),
    )


def check_model(model: Any, engine: "SimEngine") -> str:
    """The model's name, the served one if none is given. Raises `NotFound` for another."""
    if model is None or model == engine.options.model or model in engine.loras:
        return str(model or engine.options.model)
    raise NotFound(
        f"The model `{model}` does not exist. Valid aliases: {engine.options.model}.", param="model"
    )


def _max_tokens(body: Mapping[str, Any]) -> int:
    value = body.get("max_completion_tokens", body.get("max_tokens"))
    if value is None:
        return _DEFAULT_MAX_TOKENS
    if not isinstance(value, int) or value < 1:
        raise BadRequest(
            f"max_tokens must be at least 1, got {value}.",
            param="max_tokens",
            kind="BadRequestError",
        )
    return value


def _choices(body: Mapping[str, Any]) -> int:
    choices = int(body.get("n") or 1)
    if choices > 1 and body.get("temperature") == 0:
        message = f"n must be 1 when using greedy sampling, got {choices}."
        raise BadRequest(message, kind="BadRequestError")
    return choices


def _check_length(prompt: int, limit: int, most: int) -> None:
    if prompt + limit > most:
        raise BadRequest(
            f"This model's maximum context length is {most} tokens. However, you requested "
            f"{limit} output tokens and your prompt contains at least {prompt} input tokens, for "
            f"a total of at least {prompt + limit} tokens.",
            param="input_tokens",
            kind="BadRequestError",
        )
