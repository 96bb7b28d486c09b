"""A replica's address: the one form of its URL, and the id that follows from it.

Pure. Two spellings of one server must not become two replicas, so case, a trailing slash and the
default port are settled here, once. What it does not do: resolve names or open connections.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, urlsplit

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def normalise_url(url: str) -> str:
    """Return `scheme://host:port` in lower case; ValueError says what is wrong with the URL."""
    parts = _split(url)
    return f"{parts.scheme}://{_host_and_port(parts, url)}"


def replica_id(url: str) -> str:
    """Return a replica's id, `host:port`, from its URL; ValueError as `normalise_url`."""
    return _host_and_port(_split(url), url)


def url_host(host: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _split(url: str) -> SplitResult:
    if "@" in url:  # before any message quotes it
        raise ValueError("a replica's URL carries no user or password; set auth.replica_token")
    try:
        parts = urlsplit(url.strip())
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL such as http://host:8000")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: a replica's URL ends after the port")
    return parts


def _host_and_port(parts: SplitResult, url: str) -> str:
    host = parts.hostname or ""
    if any(c.isspace() or c in ",\\" for c in host) or not _can_be_looked_up(host):
        raise ValueError(f"{url!r} has no valid host")
    try:
        port = _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: the port is not a number from 1 to 65535") from error
    if port == 0:
        raise ValueError(f"{url!r}: the port is not a number from 1 to 65535")
    return f"{url_host(host)}:{port}"


def _can_be_looked_up(host: str) -> bool:
    """Whether this could be a name: Python's look-up breaks on empty parts and over-long ones."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True
