"""The command line, `fleet`: serve, sim, demo, and what operators type.

Each command is a few lines; what it does lives elsewhere. Heavy parts (torch) are imported only by
the commands that need them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn, cast

import httpx
import typer
from rich.console import Console
from rich.live import Live

from fleet.errors import FleetError
from gateway.settings import CLIENT_URL, SettingsError, load_settings
from gateway.version import gateway_version

app = typer.Typer(
    help="One URL that makes a fleet of vLLM servers take new weights together, or not at all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Option(help="The gateway; user:token@ in it authenticates.")]
DEFAULT_URL = os.environ.get(CLIENT_URL, "http://127.0.0.1:8000")
console = Console()


_Misuse: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for any wrong use of the command line; it exports only this child of it."""


_VALIDATORS_WORDS = re.compile(r"Input should be (.*?)(?:, unable to parse .*)?$")


def main() -> None:
    """Run the command line; wrong use of it ends in one line, as wrong settings do."""
    try:
        status = app(standalone_mode=False)
    except _Misuse as error:
        status = _misused(error)
    except typer.Abort:
        status = 1
    sys.exit(status)


def _misused(error: Any) -> int:
    fact = " ".join(error.format_message().split()).rstrip(".")
    fact = _VALIDATORS_WORDS.sub(r"must be \1", fact)
    if fact:  # not if no command was given: then the help has been shown already
        command = error.ctx.command_path if error.ctx else "fleet"
        print(f"fleet: {fact}; {command} --help says what there is", file=sys.stderr)
    return error.exit_code


def _version(wanted: bool) -> None:
    if wanted:
        print(gateway_version())
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """One URL that makes a fleet of vLLM servers take new weights together, or not at all."""
    del version


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (0.0.0.0).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8000).")] = None,
    replica: Annotated[list[str] | None, typer.Option(help="A replica's URL; repeat it.")] = None,
    store: Annotated[str | None, typer.Option(help="memory:// or redis://… (memory://).")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes on the port; needs Redis.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with settings.")] = None,
) -> None:
    """Serve the gateway in front of the replicas. All settings: docs/settings.md (FLEET_*)."""
    flags: dict[str, Any] = {"host": host, "port": port, "replicas": replica, "store": store}
    try:
        settings = load_settings(
            environ=os.environ, flags=flags | {"workers": workers}, config=config
        )
        with shared_counters(settings.workers):
            from gateway.server import serve as run

            status = run(settings)
    except (SettingsError, FleetError, OSError) as error:
        _fail(str(error))
    sys.exit(status)


@app.command()
def sim(
    replicas: Annotated[int, typer.Option(help="How many simulated servers.")],
    world_size: Annotated[int, typer.Option(help="Workers of each.")] = 1,
    base_port: Annotated[int, typer.Option(help="First of the consecutive ports.")] = 9000,
    control_port: Annotated[
        int | None, typer.Option(help="A port that answers for replicas that are down.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Weight transfer backend.")] = "gloo",
    token_delay_ms: Annotated[float, typer.Option(help="Time per token.")] = 1.0,
) -> None:
    """Run simulated vLLM servers on 127.0.0.1, with real tensors and scriptable faults."""
    _need_torch()
    from fleet.sim import SimOptions
    from fleet.sim import serve as run

    options: dict[str, Any] = {
        "replicas": replicas,
        "world_size": world_size,
        "base_port": base_port,
        "control_port": control_port,
        "backend": backend,
        "token_delay_ms": token_delay_ms,
    }
    try:
        run(SimOptions(**options))
    except ValueError as error:
        _fail(f"{error}; fleet sim --help says what there is")
    except (OSError, OverflowError) as error:
        _fail(f"{error}; choose other ports with --base-port{_or_control_port(control_port)}")


@app.command()
def demo(
    replicas: Annotated[int, typer.Option(min=1, help="Simulated servers.")] = 4,
    versions: Annotated[int, typer.Option(min=1, help="Weight versions to sync.")] = 3,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts in flight.")] = 24,
) -> None:
    """Show the main job on simulated servers: several weight versions, no rollout lost."""
    _need_torch()
    from gateway.demo import run_demo

    sys.exit(run_demo(replicas=replicas, versions=versions, in_flight=rollouts))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    watch: Annotated[bool, typer.Option(help="Keep showing it until Ctrl-C.")] = False,
) -> None:
    """Show the fleet: version, phase, gate, and every replica with its reason."""
    from gateway.tables import status_table

    def table() -> Any:
        return status_table(_get(url, "/fleet"), _get(url, "/fleet/replicas"), time.time())

    if not watch:
        console.print(table())
        return
    with Live(table(), console=console, refresh_per_second=4) as live:
        while True:
            time.sleep(1)
            live.update(table())


@app.command("replicas")
def list_replicas(url: Url = DEFAULT_URL) -> None:
    """List the replicas."""
    from gateway.tables import replicas_table

    console.print(replicas_table(_get(url, "/fleet/replicas")))


@app.command("rounds")
def list_rounds(url: Url = DEFAULT_URL) -> None:
    """List the weight updates, newest first."""
    from gateway.tables import rounds_table

    console.print(rounds_table(_get(url, "/fleet/rounds")))


@app.command()
def pause(
    url: Url = DEFAULT_URL,
    mode: Annotated[str, typer.Option(help="keep, wait or abort.")] = "keep",
) -> None:
    """Pause every replica; rollouts wait at the gate."""
    answer = _call("POST", url, f"/pause?mode={mode}")
    print(_summary("paused {}, rollouts wait at the gate", answer))


@app.command()
def resume(url: Url = DEFAULT_URL) -> None:
    """Resume every replica and open the gate."""
    print(_summary("resumed {}", _call("POST", url, "/resume")))


@app.command()
def abort(
    request_ids: Annotated[
        list[str] | None, typer.Argument(help="Ids that clients know; none means all.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Abort rollouts: those named, or all."""
    body = {"request_ids": request_ids} if request_ids else {}
    answer = _call("POST", url, "/abort_requests", body)
    what = "id" if request_ids else "rollout"  # ids count also if they match nothing
    print(_summary(f"aborted {_counted(answer['aborted'], what)}", answer))


@contextmanager
def shared_counters(workers: int) -> Generator[None]:
    """Let several workers count in files of one folder; the library looks for it when loaded."""
    if workers == 1:
        yield
        return
    with TemporaryDirectory(prefix="fleet-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield


def _or_control_port(chosen: int | None) -> str:
    return "" if chosen is None else " or --control-port"


def _need_torch() -> None:
    # Else each join that a trainer abandons fills the terminal with a stack trace of torch's C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if find_spec("torch") is None:
        _fail("simulated servers hold real tensors and need torch: pip install '.[sim]'")


def _get(url: str, path: str) -> Any:
    return _call("GET", url, path)


def _call(method: str, url: str, path: str, body: Any = None) -> Any:
    where = re.sub("//[^/]*@", "//", url)  # a token is nobody's to read
    elsewhere = "--url or FLEET_URL says where it is"
    try:
        answer = httpx.request(method, url.rstrip("/") + path, json=body, timeout=900)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _fail(f"no gateway answers at {where}: {error}; {elsewhere}")
    content = _object(answer)
    if {"error", "hint"} <= content.keys():
        hint = f" ({content['hint']})" if content["hint"] else ""
        _fail(f"{answer.status_code}: {content['error']['message']}{hint}")
    if not answer.is_success and answer.status_code not in (404, 405):
        _fail(f"{answer.status_code}: {answer.text[:500]}")
    if not content.keys() & {"replicas", "rounds"}:
        said = "took it for itself alone" if answer.is_success else "does not know it"
        _fail(f"what answers {method} {path} at {where} is no gateway, it {said}; {elsewhere}")
    return content


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        content: object = answer.json()
    except ValueError:
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _summary(done: str, answer: Any) -> str:
    """Return what was done, `{}` for on how many replicas, and why not on the others."""
    outcomes = answer["replicas"].items()
    others = [f"{r} {o['outcome']}: {o['detail']}" for r, o in outcomes if o["outcome"] != "ok"]
    many = _counted(len(outcomes) - len(others), "replica")
    return "; ".join([done.format(many), *others])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _fail(message: str) -> NoReturn:
    print(f"fleet: {message}", file=sys.stderr)
    raise typer.Exit(2)
