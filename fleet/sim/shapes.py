"""The JSON of generation answers, whole and streamed, as vLLM 0.32 shapes it, plus ``sim``.

Pure: from a `Job` and its tokens to bodies. The protocol classes it follows are in
``entrypoints/openai/{completion,chat_completion}/protocol.py`` and ``entrypoints/scale_out``.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fleet.sim.errors import SimError
from fleet.sim.generation import decode
from fleet.sim.log import RolloutRecord
from fleet.sim.prompts import Job
from fleet.sim.scheduler import SimRequest

if TYPE_CHECKING:
    from fleet.sim.engine import SimEngine

_OBJECTS = {"text": "text_completion", "chat": "chat.completion", "tokens": "text_completion"}


def whole(job: Job, engine: "SimEngine") -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [_choice(job, index, request) for index, request in enumerate(job.batch)]
    if job.kind == "tokens":
        head: dict[str, Any] = {"request_id": job.answer_id, "model": job.model}
    else:
        head = _head(job, _OBJECTS[job.kind])
    return {**head, "choices": choices, "usage": usage(job), "sim": facts(job, engine)}


def new_chunks(job: Job, sent: list[int], engine: "SimEngine") -> Iterator[str]:
    """The stream events for tokens made since the last call; counts them in `sent`."""
    for index, request in enumerate(job.batch):
        while sent[index] < len(request.token_ids):
            sent[index] += 1
            last = sent[index] == request.max_tokens
            yield _chunk(job, index, sent[index] - 1, engine if last else None)


def last_chunks(job: Job, engine: "SimEngine") -> Iterator[str]:
    """The events after the last token; aborted choices say so here."""
    for index, request in enumerate(job.batch):
        if request.aborted and len(request.token_ids) < request.max_tokens:
            yield _chunk(job, index, None, engine)
    if job.include_usage:
        name = f"{_OBJECTS[job.kind]}.chunk" if job.kind == "chat" else _OBJECTS[job.kind]
        yield json.dumps({**_head(job, name), "choices": [], "usage": usage(job)})
    yield "[DONE]"


def error_event(error: SimError) -> str:
    """What vLLM puts into a stream that cannot go on."""
    return json.dumps(error.body())


def usage(job: Job) -> dict[str, Any]:
    """Token counts."""
    out = job.completion_tokens
    return {
        "prompt_tokens": job.prompt_tokens,
        "total_tokens": job.prompt_tokens + out,
        "completion_tokens": out,
        "prompt_tokens_details": None,
    }


def facts(job: Job, engine: "SimEngine") -> dict[str, Any]:
    """The ``sim`` key: who answered, and which weights made which tokens.

    `checksum`, `version` and `kv` are those of the first choice's last token; `choices` has, for
    each choice, `kv` and the spans of tokens.
    """
    first = job.batch[0]
    last = first.spans[-1] if first.spans else None
    return {
        "replica": engine.index,
        "instance": engine.instance_id,
        "checksum": last.checksum if last else engine.checksum,
        "version": last.version if last else engine.version,
        "kv": first.kv,
        "choices": [
            {"kv": request.kv, "spans": [asdict(span) for span in request.spans]}
            for request in job.batch
        ],
    }


def record(path: str, job: Job, outcome: str, began: float) -> RolloutRecord:
    """The log entry of a job that is over."""
    first = job.batch[0]
    last = first.spans[-1] if first.spans else None
    return RolloutRecord(
        path=path,
        request_id=job.answer_id,
        outcome=outcome,
        tokens=job.completion_tokens,
        version=last.version if last else "",
        checksum=last.checksum if last else "",
        kv=first.kv,
        t_start=began,
    )


def _head(job: Job, name: str) -> dict[str, Any]:
    return {"id": job.answer_id, "object": name, "created": int(time.time()), "model": job.model}


def _choice(job: Job, index: int, request: SimRequest) -> dict[str, Any]:
    every = range(len(request.token_ids))
    choice: dict[str, Any] = {
        "index": index,
        "logprobs": _logprobs(job, request, every),
        "finish_reason": request.finish_reason,
        "stop_reason": None,
    }
    text = decode(request.token_ids)
    if job.kind == "text":
        choice |= {"text": text, "prompt_logprobs": None, "prompt_token_ids": None}
    elif job.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    wanted = job.kind == "tokens" or job.return_token_ids
    choice["token_ids"] = request.token_ids if wanted else None
    if job.kind == "tokens":
        choice["weight_versions"] = _version_spans(request)
    return choice


def _version_spans(request: SimRequest) -> list[dict[str, Any]]:
    """Spans by version label alone, as vLLM gives them."""
    spans: list[dict[str, Any]] = []
    for span in request.spans:
        if spans and spans[-1]["version"] == span.version:
            spans[-1]["end"] = span.end
        else:
            spans.append({"version": span.version, "start": span.start, "end": span.end})
    return spans


def _chunk(job: Job, index: int, token: int | None, ended: "SimEngine | None") -> str:
    request = job.batch[index]
    tokens = range(token, token + 1) if token is not None else range(0)
    text = decode(request.token_ids[number] for number in tokens)
    choice: dict[str, Any] = {
        "index": index,
        "logprobs": _logprobs(job, request, tokens),
        "finish_reason": request.finish_reason if ended is not None else None,
    }
    if job.kind == "chat":
        choice["delta"] = {"content": text} if token else {"role": "assistant", "content": text}
    elif job.kind == "text":
        choice["text"] = text
    if job.kind == "tokens" or job.return_token_ids:
        choice["token_ids"] = [request.token_ids[number] for number in tokens]
    if job.kind == "tokens" and ended is not None:
        choice["weight_versions"] = _version_spans(request)
    name = "chat.completion.chunk" if job.kind == "chat" else "text_completion"
    body: dict[str, Any] = {**_head(job, name), "choices": [choice]}
    if ended is not None:
        body["sim"] = facts(job, ended)
    return json.dumps(body, separators=(",", ":"))


def _logprobs(job: Job, request: SimRequest, tokens: range) -> dict[str, Any] | None:
    if not job.logprobs:
        return None
    texts = [chr(request.token_ids[number]) for number in tokens]
    values = [request.logprobs[number] for number in tokens]
    if job.kind != "text":
        return {
            "content": [
                _one_logprob(text, value) for text, value in zip(texts, values, strict=True)
            ]
        }
    return {
        "text_offset": list(tokens),
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)],
    }


def _one_logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
