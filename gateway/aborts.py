"""Aborts: from the id that a client knows to the requests that a replica knows. Pure.

vLLM aborts by ids of its own making (vllm/entrypoints/openai/*/serving.py, 0.32): for a client's
request id `rid`, /v1/completions uses `cmpl-rid-0`, `cmpl-rid-1`, … one per prompt, chat uses
`chatcmpl-rid`, /inference/v1/generate `generate-tokens-rid`; the plain `rid` aborts nothing. A
client knows its X-Request-Id, or the `id` of the answer, or the `request_id` in its body.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import msgspec

from gateway.exchange import Exchange, Request
from gateway.heads import Headers

COMPLETIONS = b"/v1/completions"
CHAT = b"/v1/chat/completions"
GENERATE = b"/inference/v1/generate"

_PREFIXES = {COMPLETIONS: "cmpl-", CHAT: "chatcmpl-", GENERATE: "generate-tokens-"}


def internal_ids(request: Request) -> list[str]:
    """Return the ids under which a replica runs this request."""
    rid = _text(request.request_id)
    path = request.target.partition(b"?")[0]
    named = f"{_PREFIXES.get(path, '')}{rid}"
    if path != COMPLETIONS:
        return [named]
    return [f"{named}-{number}" for number in range(_count_prompts(_body(request)))]


def guesses(name: str) -> list[str]:
    """Return every id that a replica may run a request under which we do not know of."""
    known = (name, f"cmpl-{name}-0", f"{name}-0", f"chatcmpl-{name}", f"generate-tokens-{name}")
    return list(dict.fromkeys(known))


def names_of(request: Request) -> set[str]:
    """Return every name by which a client may mean this request."""
    rid = _text(request.request_id)
    told = _body(request).get("request_id") if b'"request_id"' in request.body else None
    prefix = _PREFIXES.get(request.target.partition(b"?")[0], "")
    known = {rid, told} if isinstance(told, str) else {rid}
    return known | {prefix + name for name in known}


class Plan:
    """Who is to be aborted where: `held` at the gate, `at` each replica, `unknown` to this gateway.

    `names` None means everyone.
    """

    def __init__(self, running: Collection[Exchange], names: Iterable[str] | None) -> None:
        self._everyone = names is None
        self.held = [e for e in running if e.replica is None] if names is None else []
        self.at: dict[str, list[str]] = {}
        self.unknown: list[str] = []
        known: dict[str, list[Exchange]] = {}
        for exchange in running:
            for name in names_of(exchange.request):
                known.setdefault(name, []).append(exchange)
        for name in names or ():
            self._place(name, known.get(name) or known.get(_without_number(name)) or [])

    def _place(self, name: str, meant: list[Exchange]) -> None:
        if not meant:
            self.unknown += guesses(name)
        for exchange in meant:
            if exchange.replica is None:
                self.held.append(exchange)
            else:
                self.at.setdefault(exchange.replica.id, []).extend(internal_ids(exchange.request))

    def body_for(self, replica: str) -> bytes | None:
        """Return the body of this replica's abort call, or None if it needs none."""
        if self._everyone:
            return b"{}"
        ids = [*self.at.get(replica, ()), *self.unknown]
        return msgspec.json.encode({"request_ids": list(dict.fromkeys(ids))}) if ids else None


def _without_number(name: str) -> str:
    bare, _, number = name.rpartition("-")
    return bare if number.isdigit() else name


def aborted_answer(request: Request) -> tuple[Headers, bytes]:
    """Return what vLLM answers to a request that was aborted before its first token."""
    body = _body(request)
    answer = _shape(request, body)
    if not body.get("stream"):
        return [(b"content-type", b"application/json")], msgspec.json.encode(answer)
    event = b"data: " + msgspec.json.encode(answer) + b"\n\ndata: [DONE]\n\n"
    return [(b"content-type", b"text/event-stream; charset=utf-8")], event


def _shape(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    path = request.target.partition(b"?")[0]
    rid = f"{_PREFIXES.get(path, '')}{_text(request.request_id)}"
    if path == GENERATE:
        return {"request_id": rid, "choices": [_choice(0, token_ids=[])]}
    head = {"id": rid, "created": int(time.time()), "model": body.get("model")}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    is_stream = bool(body.get("stream"))
    if path == CHAT:
        name = "delta" if is_stream else "message"
        says = {"role": "assistant", "content": ""}
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        choices = [_choice(n, **{name: says}) for n in range(_count(body))]
    else:
        kind = "text_completion"
        prompts = _count_prompts(body)
        choices = [_choice(n, text="") for n in range(prompts * _count(body))]
    return {**head, "object": kind, "choices": choices, "usage": None if is_stream else usage}


def _choice(index: int, **says: Any) -> dict[str, Any]:
    return {"index": index, **says, "logprobs": None, "finish_reason": "abort"}


def _count(body: Mapping[str, Any]) -> int:
    n = body.get("n", 1)
    return n if isinstance(n, int) and 0 < n <= 1024 else 1


def _count_prompts(body: Mapping[str, Any]) -> int:
    """A list of texts or of token lists is several prompts; a list of numbers is one."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return 1
    items = cast("list[Any]", prompt)
    return len(items) if items and not isinstance(items[0], int) else 1


def _body(request: Request) -> Mapping[str, Any]:
    try:
        body: Any = msgspec.json.decode(request.body)
    except msgspec.MsgspecError:
        return {}
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("latin-1")
