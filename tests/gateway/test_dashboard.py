"""The dashboard, over HTTP and in a real browser."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from gateway.routes.pages import FOLDER
from gateway.settings_model import Auth
from tests.cases.conftest import Case, case_of, check_error, nccl

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


async def test_the_page_and_its_parts_are_served_and_nothing_else() -> None:
    """Everything that the page names is there, under a policy that lets nothing else in."""
    async with case_of(nccl(1)) as case:
        page = await case.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        parts = re.findall(r'(?:href|src)="(/[^"]+)"', page.text)
        assert len(parts) == 2
        for part in parts:
            assert (await case.http.get(part)).status_code == 200
        check_error(await case.http.get("/dashboard/../app.py"), 404)
        check_error(await case.http.get("/dashboard/nothing.js"), 404)


async def test_every_path_that_the_script_asks_for_answers() -> None:
    """A renamed route would leave the page empty."""
    asked = re.findall(r'ask\("([^"]+)"\)', (FOLDER / "fleet.js").read_text())
    assert len(asked) == 3
    async with case_of(nccl(1)) as case:
        for path in asked:
            assert (await case.http.get(path)).status_code == 200, path


async def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    """The page holds no data; its routes want the operator's token."""
    async with case_of(nccl(1), auth=Auth.model_validate({"operator_token": "o"})) as case:
        assert (await case.http.get("/")).status_code == 200
        assert (await case.http.get("/fleet")).status_code == 401


async def shown_in_a_browser(case: Case, profile: Path) -> str:
    """Return the page's text after the browser has run it for some seconds of its own time."""
    assert CHROMIUM is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *words,
        f"--user-data-dir={profile}",
        "--dump-dom",
        str(case.http.base_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await asyncio.wait_for(browser.communicate(), 60)
    return out.decode()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_a_browser_shows_replicas_versions_and_what_is_wrong(tmp_path: Path) -> None:
    """States with their reasons, rounds with their times, and the pause that holds the fleet."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("step-7")
        await case.replicas[1].die()
        await case.await_states("ready", "gone")
        await case.ok("/pause?mode=keep")
        page = await shown_in_a_browser(case, tmp_path)
    for told in ("step-7", "committed", "gone", "Paused by", "closed", case.replicas[0].id):
        assert told in page, page
    assert 'class="bad">gone' in page
    assert "step-7?" in page  # of the one that is gone: nobody knows what it holds
    assert "Next: membership changed: re-init with world_size=2 (left out" in page
    assert '<p id="no-rounds" hidden' in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_a_browser_shows_what_to_do_after_a_failure_and_each_reason_once(
    tmp_path: Path,
) -> None:
    """The advice is that of GET /fleet, to the letter."""
    async with case_of(nccl(2)) as case:
        fresh = await shown_in_a_browser(case, tmp_path / "fresh")
        await case.first_sync("step-7")
        case.replicas[1].faults.add("/finish_weight_update", "status")
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        assert (await case.finish("step-8")).status_code == 424
        hint = (await case.http.get("/fleet")).json()["hint"]
        page = await shown_in_a_browser(case, tmp_path / "failed")
    assert '<p id="no-rounds">No rounds yet.' in fresh
    assert "Next:" not in fresh
    assert f"Next: {hint}." in page
    assert "Round 2: finish failed." in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_a_browser_without_a_token_is_asked_for_one(tmp_path: Path) -> None:
    """And shows nothing of the fleet."""
    async with case_of(nccl(1), auth=Auth.model_validate({"operator_token": "o"})) as case:
        page = await shown_in_a_browser(case, tmp_path)
        assert "operators only" in page
        assert '<form id="login" hidden' not in page
        assert case.replicas[0].id not in page
