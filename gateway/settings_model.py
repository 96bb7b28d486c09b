"""Every setting of the gateway, in groups: its name, unit, bounds and the reason for its default.

The models are frozen and read nothing: `settings.py` collects flags, environment and file.
docs/settings.md is generated from here. Unknown names are refused everywhere.
"""

from __future__ import annotations

import json
import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from fleet.facts.address import normalise_url, replica_id
from fleet.store import check_store_url

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

PLACEHOLDERS: Final = ("id", "url", "host", "port")
"""What fleet/replicas/restart.py fills into the words of a restart command."""
_PLACEHOLDER: Final = re.compile(r"(?<![{$])\{([A-Za-z_]\w*)\}(?!\})")
"""Braces around a single name; a shell's ${name}, JSON and {{templates}} are for the command."""


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _off_is_a_word(value: object) -> object:
    """Read YAML's unquoted `off`, which is false to it, as the word that was written."""
    return "off" if value is False else value


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return [part for part in (piece.strip() for piece in value.split(",")) if part]
    return value


def _parse_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _check_token(value: SecretStr) -> SecretStr:
    token = value.get_secret_value()
    if not token or not token.isascii() or any(c <= " " or c == "\x7f" for c in token):
        raise ValueError("a token is not empty and has printable ASCII characters only, no spaces")
    return value


Seconds = Annotated[float, BeforeValidator(_not_bool), Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_not_bool), Field(gt=0)]
CountOrZero = Annotated[int, BeforeValidator(_not_bool), Field(ge=0)]
Port = Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=65535)]
ReplicaPort = Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=65535)]


class _Group(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class PauseOnUpdate(StrEnum):
    """What a round does about rollouts that run when it starts."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"
    OFF = "off"


class DiscoveryKind(StrEnum):
    """Where the list of replicas comes from."""

    STATIC = "static"
    DNS = "dns"
    KUBERNETES = "kubernetes"


class GateMode(StrEnum):
    """What a closed gate does with a rollout."""

    HOLD = "hold"
    REJECT = "reject"


class RoutingPolicy(StrEnum):
    """How a replica is chosen among the eligible ones."""

    LEAST_INFLIGHT = "least_inflight"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"
    PREFIX = "prefix"


class DeploymentKind(StrEnum):
    """How servers share the ranks of one group."""

    INDEPENDENT = "independent"
    DATA_PARALLEL = "data_parallel"
    EXPERT_PARALLEL = "expert_parallel"


class LogLevel(StrEnum):
    """The least important message that is still written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a log line looks."""

    TEXT = "text"
    JSON = "json"


class Gate(_Group):
    """The gate that holds rollouts back while weights change."""

    mode: GateMode = GateMode.HOLD
    """`hold` lets rollouts wait, `reject` answers 503 at once. Holding, because clients that
    retry by themselves multiply their requests."""
    max_held: Count = 20_000
    """Rollouts held at once, per gateway; more are answered 503. RL keeps tens of thousands in
    flight, so the default does not fail a normal step."""
    max_held_bytes: Count = GIB
    """Bytes of held request bodies, per gateway; more are answered 503. Bounds memory."""
    timeout_s: Seconds = 600.0
    """Seconds that one rollout may be held; then 504. Longer than an update of a large model."""


class Routing(_Group):
    """The choice of a replica for a rollout."""

    policy: RoutingPolicy = RoutingPolicy.LEAST_INFLIGHT
    """`least_inflight`, fewest requests in flight first: answers differ in length by orders of
    magnitude. `round_robin` takes turns; `power_of_two` takes the less busy of two drawn ones;
    `consistent_hash` keeps an X-Session-Id on one replica, `prefix` prompts that start alike, both
    unless it is overloaded. What has no session or no readable prompt goes by `least_inflight`."""


class Timeouts(_Group):
    """Deadlines and intervals; every collective has one, so nobody waits for a corpse."""

    init_s: Seconds = 300.0
    """Seconds for the whole group to meet. vLLM's own client gives up after the same time."""
    update_s: Seconds = 1800.0
    """Seconds for one update call on all replicas. A large checkpoint over a slow link fits."""
    pause_s: Seconds = 60.0
    """Seconds for all replicas to pause; mode `wait` has the gate's time instead."""
    start_s: Seconds = 60.0
    """Seconds for all replicas to start an update."""
    finish_s: Seconds = 300.0
    """Seconds for all replicas to finish an update; loading may post-process every layer."""
    control_s: Seconds = 60.0
    """Seconds for any other control call, such as resume, sleep or a cache reset."""
    probe_s: Seconds = 1.0
    """Seconds between two probes of one replica: a lost one is noticed about as fast."""
    probe_timeout_s: Seconds = 5.0
    """Seconds for the answer to one probe; a busy server answers late, not never."""
    lease_s: Seconds = 5.0
    """Seconds after which a gateway without a sign of life counts as gone: it has closed its gate
    by then, and another one takes its call over. So long a dead gateway can delay a pause."""
    lease_renew_s: Seconds = 1.0
    """Seconds between two signs of life of a gateway; below lease_s, so that some may fail."""
    pause_lease_s: Seconds | None = None
    """Seconds after which a pause of the trainer that nothing follows is resumed; asking again
    renews it. Unset: it lasts until somebody resumes, and shows in the metrics."""
    round_s: Seconds | None = None
    """Seconds after which a round that its trainer has left open between two calls is abandoned, as
    by /fleet/reset. Unset: it stays open, and shows in the metrics."""
    drain_s: Seconds = 30.0
    """Seconds for rollouts to end when the gateway stops, those that it holds included."""

    @field_validator("lease_renew_s")
    @classmethod
    def _renew_before_loss(cls, value: float, info: ValidationInfo) -> float:
        if value >= info.data.get("lease_s", float("inf")):
            raise ValueError(f"must be below lease_s ({info.data['lease_s']:g}), is {value:g}")
        return value


class Limits(_Group):
    """Sizes of request bodies; a larger one is refused before it is read whole."""

    control_body_bytes: Count = 16 * MIB
    """Bytes of a control body other than an update; tensor names of a large model fit."""
    update_body_bytes: Count = GIB
    """Bytes of an update body; `ipc` bodies carry handles, other backends names and shapes."""
    rollout_body_bytes: Count = 64 * MIB
    """Bytes of a rollout body; images in base64 fit."""


class RestartHook(_Group):
    """How replicas are restarted, by `/fleet/replicas/{id}/restart` or by themselves; one way."""

    command: Annotated[str, Field(min_length=1)] | None = None
    """Command that restarts one; `{id}`, `{url}`, `{host}` and `{port}` stand for the replica. Run
    without a shell."""
    webhook: Annotated[str, Field(min_length=1)] | None = None
    """URL that gets `{"id", "url", "reason"}` by POST and has the replica restarted."""
    wedged_s: Seconds | None = None
    """Seconds after which a wedged replica is restarted unasked. Unset: only when an operator asks.
    Fenced ones never are: the next full update heals them sooner."""
    timeout_s: Seconds = 60.0
    """Seconds that the command or the URL may take to accept."""

    @field_validator("command")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        if value is not None and not shlex.split(value):
            raise ValueError("the command is empty")
        unknown = [n for n in _PLACEHOLDER.findall(value or "") if n not in PLACEHOLDERS]
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"nothing is filled in for {{{unknown[0]}}}, only for {known}")
        return value

    @field_validator("webhook")
    @classmethod
    def _one_way(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if info.data.get("command") is not None:
            raise ValueError("set either the command or the webhook, not both")
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"an http or https URL is needed, not {value!r}")
        return value


class Auth(_Group):
    """Who may do what (gateway/auth.py has the table); nothing set means that all is open."""

    trainer_token: SecretStr | None = None
    """Opens the trainer's control calls, and rollouts."""
    operator_token: SecretStr | None = None
    """Opens everything."""
    rollout_token: SecretStr | None = None
    """Opens rollouts only."""
    replica_token: SecretStr | None = None
    """Sent to every replica as `Authorization: Bearer`; unset: no header is sent."""

    @property
    def guards_anything(self) -> bool:
        """Whether any token is configured."""
        tokens = (self.trainer_token, self.operator_token, self.rollout_token, self.replica_token)
        return any(token is not None for token in tokens)

    @field_validator("trainer_token", "operator_token", "rollout_token", "replica_token")
    @classmethod
    def _usable_in_headers(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else _check_token(value)


class Deployment(_Group):
    """Servers that share ranks in one way; replicas not listed are probed."""

    replicas: Annotated[tuple[str, ...], BeforeValidator(_split_commas), Field(min_length=1)]
    """URLs or `host:port` of the servers; kept as `host:port`."""
    kind: DeploymentKind = DeploymentKind.INDEPENDENT
    """How they share ranks."""
    world_size: Count | None = None
    """Workers of one server, tensor × pipeline parallel; unset: probed."""

    @field_validator("replicas")
    @classmethod
    def _as_ids(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        ids = tuple(replica_id(v if "://" in v else f"http://{v}") for v in value)
        return _no_duplicates(ids)


class Dns(_Group):
    """Replicas behind one name, such as a headless Service's: `FLEET_DISCOVERY=dns`."""

    host: Annotated[str, Field(min_length=1)] | None = None
    """Name whose A and AAAA records are the replicas."""
    port: ReplicaPort = 8000
    """Port on which every one of them listens."""
    interval_s: Seconds = 5.0
    """Seconds between two questions; about as long as cluster DNS keeps an answer."""


class Kubernetes(_Group):
    """Replicas that are pods: `FLEET_DISCOVERY=kubernetes`."""

    namespace: Annotated[str, Field(min_length=1)] | None = None
    """Namespace of the pods; unset: the gateway's own, as its service account tells."""
    selector: Annotated[str, Field(min_length=1)] | None = None
    """Label selector of the pods, as kubectl's `-l` takes it: `app=vllm,role in (a,b)`."""
    port: ReplicaPort = 8000
    """Port on which vLLM listens in every pod that names no other one in `fleet.vllm.ai/port`."""
    api: str | None = None
    """URL of the API server, for instance of `kubectl proxy`; unset: the cluster's own."""
    restart: bool = False
    """Restart a replica by deleting its pod when an operator asks for it. Off, because the
    service account needs the right to delete pods for that."""

    @field_validator("api")
    @classmethod
    def _as_origin(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "http://none")
        usable = parts.scheme in ("http", "https") and parts.hostname and not parts.username
        if not usable or parts.port == 0:
            raise ValueError("a URL such as https://10.0.0.1:443 is needed, without a user")
        return value and value.rstrip("/")


class Log(_Group):
    """What is written to standard error."""

    level: LogLevel = LogLevel.INFO
    """The least important message that is written."""
    format: LogFormat = LogFormat.TEXT
    """Text for people, JSON lines for collectors."""
    access: Annotated[str, Field(min_length=1)] | None = None
    """File that gets one JSON line per rollout: versions, replica, times, tokens. Off, because
    thousands of rollouts a second write much."""

    @field_validator("access")
    @classmethod
    def _in_a_folder(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).absolute().parent.is_dir():
            raise ValueError(f"there is no folder for {value!r}")
        return value


class Settings(_Group):
    """Everything that can be set; built once, by `load_settings` or by a test, then passed on."""

    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address to listen on; all, because a gateway in a container serves others."""
    port: Port = 8000
    """Port to listen on, vLLM's own; 0 takes a free one."""
    replicas: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = ()
    """URLs of the replicas, comma-separated or a list; more can be added while it runs."""
    store: Annotated[str, Field(repr=False)] = "memory://"
    """Where the state lives: `memory://`, `redis://`, `rediss://` or `unix://`. In memory it is
    lost with the process and cannot be shared by several gateways."""
    workers: Count = 1
    """Processes that serve the port, each a gateway of its own on a core of its own; more than one
    meet in Redis, so they need such a store."""
    name: str = "fleet"
    """Name of the fleet, the prefix of its keys: several fleets may share one Redis."""
    pause_on_update: Annotated[PauseOnUpdate, BeforeValidator(_off_is_a_word)] = PauseOnUpdate.KEEP
    """vLLM's pause mode around an update. `keep` freezes running rollouts and continues them,
    so nothing is lost; `off` leaves pausing to the trainer."""
    auto_version: bool = True
    """Number a committed update by a counter when the trainer names no version; off: vLLM's
    label stays what it was."""
    min_replicas: CountOrZero = 0
    """Members below which an init is refused; 0 takes what there is."""
    allow_collective_rpc: bool = False
    """Let operators call /collective_rpc, which runs any method in the workers; off for that."""
    gate: Gate = Gate()
    routing: Routing = Routing()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    restart: RestartHook = RestartHook()
    auth: Auth = Auth()
    log: Log = Log()
    dns: Dns = Dns()
    kubernetes: Kubernetes = Kubernetes()
    discovery: DiscoveryKind = DiscoveryKind.STATIC
    """Where replicas come from besides `replicas`: nowhere else (`static`), from a name (`dns`) or
    from the API server (`kubernetes`)."""
    topology: Annotated[tuple[Deployment, ...], BeforeValidator(_parse_json)] = ()
    """How servers share ranks, where probing cannot tell: a list of {replicas, kind, world_size},
    JSON in the environment."""

    def public(self) -> dict[str, Any]:
        """Return all settings as plain values, fit to be shown: secrets are masked."""
        return self.model_dump(mode="json") | {"store": _without_password(self.store)}

    @field_validator("replicas")
    @classmethod
    def _normalised(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(normalise_url(url) for url in value)
        _no_duplicates(tuple(replica_id(url) for url in urls))
        return urls

    @field_validator("name")
    @classmethod
    def _fit_for_keys(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9-]{1,63}", value):
            raise ValueError(f"1 to 63 lower-case letters, digits and hyphens, not {value!r}")
        return value

    @field_validator("store")
    @classmethod
    def _known_store(cls, value: str) -> str:
        check_store_url(value)
        return value

    @field_validator("workers")
    @classmethod
    def _meet_somewhere(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and str(info.data.get("store", "")).startswith("memory:"):
            raise ValueError("several workers meet in the store: set FLEET_STORE to redis://…")
        return value

    @field_validator("discovery")
    @classmethod
    def _knows_where_to_look(cls, value: DiscoveryKind, info: ValidationInfo) -> DiscoveryKind:
        dns, kubernetes = info.data.get("dns", Dns()), info.data.get("kubernetes", Kubernetes())
        if value is DiscoveryKind.DNS and dns.host is None:
            raise ValueError("dns needs FLEET_DNS__HOST, the name that lists the replicas")
        if value is DiscoveryKind.KUBERNETES and kubernetes.selector is None:
            raise ValueError("kubernetes needs FLEET_KUBERNETES__SELECTOR, the labels of the pods")
        return value

    @field_validator("topology")
    @classmethod
    def _one_deployment_each(cls, value: tuple[Deployment, ...]) -> tuple[Deployment, ...]:
        _no_duplicates(tuple(replica for entry in value for replica in entry.replicas))
        return value


def _no_duplicates(ids: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((id_ for n, id_ in enumerate(ids) if id_ in ids[:n]), None)
    if twice is not None:
        raise ValueError(f"replica {twice} is listed twice")
    return ids


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    where = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{where}{parts.path}"
