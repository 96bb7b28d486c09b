"""docs/http.md, sent to a gateway call by call; and no route that it leaves out."""

from __future__ import annotations

import re

import httpx
import pytest

from gateway.rollouts import PREFIXES, is_rollout
from gateway.settings_model import Settings
from tests.cases.conftest import Case, case_of, nccl
from tests.docs.exchanges import Exchange, differences, exchanges_of
from tests.docs.pages import ROOT, text_of
from tests.gateway.serving import serve

PAGE = ROOT / "docs" / "http.md"
SHOWN: tuple[str, ...] = ("127.0.0.1:9000", "127.0.0.1:9001")


async def test_every_call_that_is_shown_answers_what_is_shown() -> None:
    """In the order of the page, to a fleet that is fresh at its beginning."""
    exchanges = exchanges_of(text_of(PAGE))
    assert len(exchanges) > 35
    async with case_of(nccl(2)) as case:
        wrong = [told for found in exchanges for told in await _wrong(case, found)]
    assert not wrong, "\n".join(wrong)


async def _wrong(case: Case, exchange: Exchange) -> list[str]:
    """Send one call; return what its answer has otherwise than the page."""
    ports = {shown: replica.id for shown, replica in zip(SHOWN, case.replicas, strict=True)}
    answer = await case.http.request(
        exchange.method,
        _swapped(exchange.path, ports),
        content=exchange.body and _swapped(exchange.body, ports),
        headers=exchange.headers,
    )
    call = f"{exchange.method} {exchange.path}"
    if answer.status_code != exchange.status:
        return [f"{call}: {answer.status_code} {answer.text}"]
    if exchange.head is not None:
        return [f"{call}: {told}" for told in _wrong_head(exchange.head, answer)]
    back = {replica: shown for shown, replica in ports.items()}
    found = httpx.Response(200, text=_swapped(answer.text, back)).json()
    if not exchange.whole and exchange.method == "POST" and "replicas" not in exchange.answer:
        found.pop("replicas", None)
    return [f"{call}: {told}" for told in differences(exchange.answer, found)]


def _swapped(text: str, ids: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, ids)), lambda found: ids[found.group()], text)


def _wrong_head(head: str, answer: httpx.Response) -> list[str]:
    status, *lines = head.splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    wrong = differences({**said, "…": "…"}, dict(answer.headers))
    return wrong if status.split()[1] == str(answer.status_code) else [status, *wrong]


async def test_every_route_is_named_and_no_other_one() -> None:
    """`/openapi.json` has what the gateway answers itself."""
    async with serve(Settings()) as served:
        told = (await served.http.get("/openapi.json")).json()["paths"]
    routes = {f"{method.upper()} {path}" for path, found in told.items() for method in found}
    text = text_of(PAGE)
    named = set(re.findall(r"`([A-Z]+ /[^`?\s]*)", text))
    named |= {f"{found.method} {found.path}".partition("?")[0] for found in exchanges_of(text)}
    named = {re.sub(r"127\.0\.0\.1:900\d", "{replica}", name) for name in named}
    own = {name for name in named if not is_rollout(name.partition(" ")[2].encode())}
    assert own == routes | {"GET /openapi.json"}


@pytest.mark.parametrize("prefix", PREFIXES, ids=bytes.decode)
def test_every_path_of_rollouts_is_named(prefix: bytes) -> None:
    """They go to one replica as they are."""
    assert re.search(f"`{prefix.decode()}…?`", text_of(PAGE))


def test_what_differs_is_found() -> None:
    """A value, a field too few, one too many, an item; … passes, and a float is a number."""
    said = {"a": 1, "b": {"c": "…"}, "d": [1, 2], "e": 0.5}
    assert differences(said, {"a": 1, "b": {"c": None}, "d": [1, 2], "e": 7.25}) == []
    assert differences(said, {"a": 2, "b": {"c": 1}, "d": [1, 2], "e": 0.5}) == [".a: 2"]
    assert differences({"a": 1}, {}) == [".a is not there"]
    assert differences({}, {"a": 1}) == [".a is there"]
    assert differences({"…": "…"}, {"a": 1}) == []
    assert differences([1, 2], [1]) == [": [1]"]
    assert differences({"a": [1]}, {"a": [3]}) == [".a[]: 3"]
    assert differences({"e": 0.5}, {"e": "soon"}) == [".e: 'soon'"]
    assert differences(["…"], [1, 2, 3]) == []
