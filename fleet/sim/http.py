"""Reading requests and writing answers the way vLLM's FastAPI routes do.

Validation failures become vLLM's 400 in its error shape; unknown paths and wrong methods give
FastAPI's ``{"detail": …}``. No route is defined here.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web

from fleet.sim.errors import BadRequest, CallFailed, SimError, error_body

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Routes = dict[str, dict[str, Handler]]
C = TypeVar("C", bound=str)

_TRUE = frozenset({"true", "1", "yes", "on", "y", "t"})
_FALSE = frozenset({"false", "0", "no", "off", "n", "f"})


def answer(content: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=json.dumps(content, separators=(",", ":")).encode(),
        status=status,
        content_type="application/json",
    )


def empty() -> web.Response:
    """An empty 200, as /health and some cache routes give."""
    return web.Response(status=200)


class CallFailedAnswer(web.Response):
    """The answer to a call that raised in the engine; the server hangs up behind it."""


def failure(error: SimError) -> web.Response:
    """A simulated error as its HTTP answer."""
    if not isinstance(error, CallFailed):
        return answer(error.body(), error.status)
    body = json.dumps(error.body()).encode()
    return CallFailedAnswer(body=body, status=error.status, content_type="application/json")


def detail(status: int, allow: Iterable[str] = ()) -> web.Response:
    """FastAPI's own answer to an unknown path (404) or a wrong method (405)."""
    reply = answer({"detail": HTTPStatus(status).phrase}, status)
    if allow:
        reply.headers["Allow"] = ", ".join(allow)
    return reply


def phrase_error(message: str, status: int) -> web.Response:
    """A route's own HTTPException, which vLLM puts into its error shape."""
    return answer(error_body(message, HTTPStatus(status).phrase, status), status)


async def body_object(request: web.BaseRequest, lacking: str | None = None) -> dict[str, Any]:
    """The body as a JSON object; empty for an absent body or one that is no object.

    Raises `BadRequest` for JSON that does not parse, and for one that is no object if `lacking`
    says which optional field it then lacks (FastAPI's odd answer, seen on the real server).
    """
    raw = await request.read()
    if not raw.strip() or "json" not in request.content_type:
        return {}  # FastAPI does not read a body that is not declared as JSON
    try:
        parsed = json.loads(raw)
    except json.JSONDecodeError as error:
        raise invalid("json_invalid", ["body", str(error.pos)], "JSON decode error") from None
    if isinstance(parsed, dict):
        return parsed
    if lacking is not None:
        raise invalid("missing", ["body", lacking], "Field required")
    return {}


async def script_object(request: web.BaseRequest, example: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a call that scripts the simulation, whatever content type it was sent with.

    These calls are typed by hand, and curl declares no JSON. Empty for an absent body; raises
    HTTPBadRequest for one that is no JSON object.
    """
    raw = await request.read()
    try:
        parsed = json.loads(raw.strip() or b"{}")
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    told = f"the body is no JSON object; send one such as {json.dumps(example)}"
    raise web.HTTPBadRequest(text=json.dumps({"detail": told}), content_type="application/json")


def invalid(kind: str, loc: list[str], message: str) -> BadRequest:
    """A pydantic validation error as vLLM words it."""
    problem = {"type": kind, "loc": ".".join(loc), "msg": message}
    return BadRequest(f"1 validation error:\n  {problem}", param=".".join(loc))


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A required field of the body. Raises `BadRequest` if it is missing or of another type."""
    if name not in body:
        raise invalid("missing", ["body", name], "Field required")
    if not isinstance(body[name], kind) or isinstance(body[name], bool):
        raise invalid("type", ["body", name], f"Input should be a valid {_named(kind)}")
    return body[name]


def _named(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(
        {"str": "string", "dict": "dictionary"}.get(k.__name__, k.__name__) for k in kinds
    )


def flag(request: web.BaseRequest, name: str, *, default: bool) -> bool:
    """A boolean query parameter. Raises `BadRequest` for another word."""
    text = request.query.get(name)
    if text is None:
        return default
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise invalid("bool_parsing", ["query", name], "Input should be a valid boolean")


def choice(request: web.BaseRequest, name: str, options: tuple[C, ...], default: C) -> C:
    """A query parameter out of a fixed set. Raises `BadRequest` for another value."""
    text = request.query.get(name)
    if text is None:
        return default
    for option in options:
        if text == option:
            return option
    listed = ", ".join(f"'{option}'" for option in options)
    raise invalid("literal_error", ["query", name], f"Input should be {listed}")


def number(request: web.BaseRequest, name: str, default: int, low: int, high: int) -> int:
    """An integer query parameter between two bounds. Raises `BadRequest` outside of them."""
    try:
        value = int(request.query.get(name, default))
    except ValueError:
        raise invalid("int_parsing", ["query", name], "Input should be a valid integer") from None
    if not low <= value <= high:
        raise invalid("range", ["query", name], f"Input should be between {low} and {high}")
    return value
