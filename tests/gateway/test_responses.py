"""How the routes answer in JSON: in one way."""

from __future__ import annotations

from pathlib import Path

import pytest

import gateway
from gateway.responses import json_response
from gateway.settings_model import Settings
from tests.gateway.serving import serve

ONE_PLACE = "responses.py"


def test_answers_in_json_are_built_in_one_place() -> None:
    """Whatever they need next (a header, another encoder) is then said once."""
    files = Path(gateway.__file__).parent.rglob("*.py")
    builders = [f.name for f in files if 'media_type="application/json"' in f.read_text("utf-8")]
    assert builders == [ONE_PLACE]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/fleet", 200), ("/version", 200), ("/get_world_size", 200), ("/nowhere", 404)],
)
async def test_every_kind_of_route_answers_in_json(path: str, status: int) -> None:
    """Operators' routes, probes, control calls, and paths that do not exist."""
    async with serve(Settings()) as served:
        answer = await served.http.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()


def test_status_and_headers_may_be_given() -> None:
    """As an answer to a wrong method needs them."""
    answer = json_response({"a": 1}, 405, {"Allow": "GET"})
    assert (answer.status_code, answer.body, answer.headers["allow"]) == (405, b'{"a":1}', "GET")
