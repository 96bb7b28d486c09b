"""The Kubernetes API server: where it is, who asks, and its answers as bytes or one error.

The only place that speaks to it. The token is read again for every request, because the kubelet
replaces a projected token long before it expires; the certificate authority with every client.
Proxy settings of the environment are passed over: the API server is never behind one from inside.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx
import msgspec

from fleet.discovery.pods import Status
from fleet.facts.address import url_host

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet projects the pod's token, certificate authority and namespace."""

CONNECT_S = 5.0
ANSWER_S = 30.0


class ApiFailed(Exception):
    """The API server gave no usable answer; `code` is its HTTP status, or None without one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class _Token(httpx.Auth):
    """Bearer authentication with whatever the file says now."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the header; no file, no header (kubectl proxy brings its own)."""
        try:
            token = self._file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            token = ""
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """One API server and the files by which it knows us and we know it."""

    url: str
    account: Path = ACCOUNT

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[httpx.AsyncClient]:
        """Open connections of their own; raises ApiFailed if the authority cannot be read."""
        async with httpx.AsyncClient(
            base_url=self.url,
            auth=_Token(self.account / "token"),
            verify=self._authority(),
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            trust_env=False,
        ) as client:
            yield client

    def _authority(self) -> ssl.SSLContext | bool:
        file = self.account / "ca.crt"
        if not self.url.startswith("https://") or not file.exists():
            return True
        try:
            return ssl.create_default_context(cafile=str(file))
        except (OSError, ssl.SSLError) as error:
            raise ApiFailed(f"{file}: {error}") from error


def api_server(url: str | None, environ: Mapping[str, str], account: Path = ACCOUNT) -> ApiServer:
    """Return the API server at `url`, or the one that the kubelet names in the environment.

    Raises ValueError if there is neither.
    """
    if url:
        return ApiServer(url=url, account=account)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ValueError("this is no pod: FLEET_KUBERNETES__API must name the API server")
    return ApiServer(url=f"https://{url_host(host)}:{port}", account=account)


def own_namespace(account: Path = ACCOUNT) -> str:
    """Return the namespace of the pod that this runs in; ValueError if it is no pod."""
    try:
        return (account / "namespace").read_text(encoding="ascii").strip()
    except OSError:
        raise ValueError("this is no pod: FLEET_KUBERNETES__NAMESPACE must be set") from None


@asynccontextmanager
async def asked(
    client: httpx.AsyncClient, path: str, params: Mapping[str, str], read_s: float = ANSWER_S
) -> AsyncGenerator[httpx.Response]:
    """GET and yield a good answer whose body has not been read; else ApiFailed."""
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=read_s)
    with _as_failure():
        async with client.stream("GET", path, params=params, timeout=timeout) as answer:
            if answer.status_code != 200:
                _refuse(answer.status_code, await answer.aread())
            yield answer


async def sent(client: httpx.AsyncClient, method: str, path: str, body: object) -> None:
    """Make a call that changes something; ApiFailed unless the answer is a good one."""
    with _as_failure():
        answer = await client.request(method, path, json=body)
    if answer.status_code not in (200, 202):
        _refuse(answer.status_code, answer.content)


@contextmanager
def _as_failure() -> Generator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ApiFailed(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


def _refuse(code: int, body: bytes) -> NoReturn:
    """Raise ApiFailed in the server's own words."""
    try:
        told = msgspec.json.decode(body, type=Status).message
    except msgspec.MsgspecError:
        told = body[:200].decode(errors="replace")
    raise ApiFailed(f"{code}: {told}", code)
