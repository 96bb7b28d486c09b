"""Settings: precedence, one clear line for anything wrong, secrets that stay secret."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleet.facts.replica import Replica
from fleet.replicas.restart import CommandRestart
from gateway.settings import (
    Auth,
    Gate,
    PauseOnUpdate,
    Settings,
    SettingsError,
    environment_name,
    load_settings,
    setting_names,
)
from gateway.settings_model import PLACEHOLDERS

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).parents[2] / "docs"

KINDS = {name: str(field.annotation) for name, field in setting_names().items()}
NUMBERS = [name for name, kind in KINDS.items() if kind in (str(int), str(float))]


def from_environment(**environ: str) -> Settings:
    """Load with these FLEET_ variables alone."""
    return load_settings(
        environ={f"FLEET_{name}": value for name, value in environ.items()}, flags={}, config=None
    )


@pytest.fixture
def from_file(tmp_path: Path) -> Callable[[str], Settings]:
    """Load with this YAML text alone."""

    def load(text: str) -> Settings:
        path = tmp_path / "fleet.yaml"
        path.write_text(text, encoding="utf-8")
        return load_settings(environ={}, flags={}, config=path)

    return load


def test_nothing_given_means_the_documented_defaults() -> None:
    """The values that the design fixes."""
    settings = load_settings(environ={"PATH": "/bin"}, flags={}, config=None)
    assert settings == Settings()
    assert (settings.store, settings.name, settings.port) == ("memory://", "fleet", 8000)
    assert settings.pause_on_update is PauseOnUpdate.KEEP
    assert (settings.gate.max_held, settings.gate.timeout_s) == (20_000, 600)
    assert (settings.timeouts.init_s, settings.timeouts.update_s) == (300, 1800)
    assert settings.allow_collective_rpc is False


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each source gives one more setting than the one above it."""
    config = tmp_path / "fleet.yaml"
    config.write_text("gate: {max_held: 1, max_held_bytes: 1, timeout_s: 1}\nname: file\n")
    environ = {"FLEET_GATE__MAX_HELD": "2", "FLEET_GATE__MAX_HELD_BYTES": "2"}
    settings = load_settings(environ=environ, flags={"gate.max_held": 3}, config=config)
    assert settings.gate == Gate(max_held=3, max_held_bytes=2, timeout_s=1)
    assert settings.name == "file"


def test_a_flag_that_was_not_given_decides_nothing() -> None:
    """Command lines pass None and empty lists for options that nobody wrote."""
    flags: dict[str, object] = {"replicas": [], "port": None, "host": "::1"}
    environ = {"FLEET_REPLICAS": "http://a:1", "FLEET_PORT": "9"}
    settings = load_settings(environ=environ, flags=flags, config=None)
    assert (settings.replicas, settings.port, settings.host) == (("http://a:1",), 9, "::1")


def test_replicas_come_as_a_comma_list_or_a_yaml_list(
    from_file: Callable[[str], Settings],
) -> None:
    """Both are brought to one form, so that one server has one id."""
    wanted = ("http://a:8000", "https://b:443", "http://[::1]:80")
    assert from_environment(REPLICAS="http://A:8000/, https://b,http://[::1],").replicas == wanted
    assert from_file("replicas: ['http://A:8000/', 'https://b', 'http://[::1]']").replicas == wanted


@pytest.mark.parametrize(
    ("replicas", "fact"),
    [
        ("a:8000", "'a:8000' is not a URL such as http://host:8000"),
        ("ftp://a:8000", "'ftp://a:8000' is not a URL such as http://host:8000"),
        ("http://", "'http://' is not a URL such as http://host:8000"),
        ("http://a:8000/v1", "'http://a:8000/v1': a replica's URL ends after the port"),
        ("http://a:8000?x", "'http://a:8000?x': a replica's URL ends after the port"),
        ("http://a:x", "'http://a:x': the port is not a number from 1 to 65535"),
        ("http://a:0", "'http://a:0': the port is not a number from 1 to 65535"),
        ("http://a b:1", "'http://a b:1' has no valid host"),
        ("http://vllm..svc:1", "'http://vllm..svc:1' has no valid host"),
        (f"http://{'a' * 64}:1", f"'http://{'a' * 64}:1' has no valid host"),
        ("http://[a", "'http://[a' is not a URL: Invalid IPv6 URL"),
        ("http://u:pw@a:1", "a replica's URL carries no user or password; set auth.replica_token"),
        ("http://a:80,http://A", "replica a:80 is listed twice"),
        ("http://a:1,https://a:1", "replica a:1 is listed twice"),
    ],
)
def test_a_replica_that_cannot_be_one_is_refused(replicas: str, fact: str) -> None:
    """Before anything is started, and by its name."""
    with pytest.raises(SettingsError) as caught:
        from_environment(REPLICAS=replicas)
    assert str(caught.value) == f"FLEET_REPLICAS: {fact}"


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("FLEET_REPLICA", "FLEET_REPLICAS"),
        ("FLEET_GATE__MAX_HOLD", "FLEET_GATE__MAX_HELD"),
        ("FLEET_GATE_MODE", "FLEET_GATE__MODE"),
        ("FLEET_GATE", "FLEET_GATE__MODE"),
        ("FLEET_TIMEOUT__INIT_S", "FLEET_TIMEOUTS__INIT_S"),
        ("FLEET_TIMEOUTS__INIT", "FLEET_TIMEOUTS__INIT_S"),
    ],
)
def test_an_unknown_variable_is_refused_and_the_nearest_name_said(
    written: str, nearest: str
) -> None:
    """A typing error must not silently leave a default in force."""
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={written: "1"}, flags={}, config=None)
    assert str(caught.value) == f"{written}: unknown setting; did you mean {nearest}?"


def test_a_variable_that_is_near_to_nothing_points_to_the_list() -> None:
    """No far-fetched guess."""
    with pytest.raises(SettingsError, match=r"docs/settings\.md lists all names"):
        from_environment(XYZZY="")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEET_SERVICE_HOST", "10.0.0.1"),
        ("FLEET_SERVICE_PORT", "8000"),
        ("FLEET_SERVICE_PORT_HTTP", "8000"),
        ("FLEET_PORT", "tcp://10.0.0.1:8000"),
        ("FLEET_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("FLEET_PORT_8000_TCP_PROTO", "tcp"),
        ("FLEET_PORT_8000_TCP_PORT", "8000"),
        ("FLEET_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("FLEET_VLLM_GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("FLEET_VLLM_GATEWAY_PORT", "tcp://10.0.0.1:8000"),
        ("FLEET_VLLM_GATEWAY_PORT_9000_UDP_ADDR", "10.0.0.1"),
    ],
)
def test_what_kubernetes_injects_is_passed_over(name: str, value: str) -> None:
    """A Service called `fleet` must not stop the gateway, nor set its port."""
    assert load_settings(environ={name: value}, flags={}, config=None) == Settings()


@pytest.mark.parametrize(
    "name", ["FLEET_GATEWAY_PORT", "FLEET_SERVICE", "FLEET_PORT_8000", "FLEET_SERVICE_HOSTS"]
)
def test_what_only_looks_like_kubernetes_is_refused(name: str) -> None:
    """The exception is no wider than it must be."""
    with pytest.raises(SettingsError, match=f"{name}: unknown setting"):
        load_settings(environ={name: "8000"}, flags={}, config=None)


SELECTOR = "FLEET_KUBERNETES__SELECTOR"
NOT_FILLED_IN = "nothing is filled in for {nope}, only for {id}, {url}, {host}, {port}"
POLICY_NAMES = "'least_inflight', 'round_robin', 'power_of_two', 'consistent_hash' or 'prefix'"


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("PAUSE_ON_UPDATE", "kep", "should be 'keep', 'wait', 'abort' or 'off', not 'kep'"),
        ("GATE__MODE", "", "should be 'hold' or 'reject', not ''"),
        ("ROUTING__POLICY", "random", f"should be {POLICY_NAMES}, not 'random'"),
        ("DISCOVERY", "dns", "dns needs FLEET_DNS__HOST, the name that lists the replicas"),
        ("DISCOVERY", "kubernetes", f"kubernetes needs {SELECTOR}, the labels of the pods"),
        ("DISCOVERY", "x", "should be 'static', 'dns' or 'kubernetes', not 'x'"),
        ("AUTO_VERSION", "2", "should be a valid boolean, unable to interpret input, not '2'"),
        ("NAME", "My_fleet", "1 to 63 lower-case letters, digits and hyphens, not 'My_fleet'"),
        ("NAME", "", "1 to 63 lower-case letters, digits and hyphens, not ''"),
        ("PORT", "65536", "should be less than or equal to 65535, not '65536'"),
        ("MIN_REPLICAS", "-1", "should be greater than or equal to 0, not '-1'"),
        ("TIMEOUTS__LEASE_S", "1", None),
        ("STORE", "redis+sentinel://:pw@h", None),
        ("KUBERNETES__API", "10.0.0.1:443", None),
        ("KUBERNETES__API", "https://me:pw@10.0.0.1", None),
        ("KUBERNETES__PORT", "0", None),
        ("RESTART__COMMAND", "restart {host} {nope}", NOT_FILLED_IN),
        ("RESTART__WEBHOOK", "http://", "an http or https URL is needed, not 'http://'"),
        ("RESTART__WEBHOOK", "http://h:99999", "Port out of range 0-65535"),
        ("TOPOLOGY", "[{", None),
        ("TOPOLOGY", "{}", None),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_variable(
    name: str, value: str, fact: str | None
) -> None:
    """Which name, what was wrong, what would be right."""
    with pytest.raises(SettingsError) as caught:
        from_environment(**{name: value})
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("FLEET_")
    assert fact is None or line == f"FLEET_{name}: {fact}"
    assert "pw" not in line


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "many", ""])
@pytest.mark.parametrize("dotted", NUMBERS)
def test_every_number_is_positive_and_finite(dotted: str, number: str) -> None:
    """No deadline of no time, none of for ever."""
    name = environment_name(dotted)
    with pytest.raises(SettingsError, match=f"^{name}: "):
        load_settings(environ={name: number}, flags={}, config=None)


@pytest.mark.parametrize("dotted", NUMBERS)
def test_a_truth_value_is_no_number(dotted: str, from_file: Callable[[str], Settings]) -> None:
    """YAML turns `on` and `yes` into true, which Python takes for 1."""
    group, _, name = dotted.rpartition(".")
    text = f"{group}: {{{name}: on}}" if group else f"{name}: on"
    with pytest.raises(SettingsError, match="a number is needed, not true or false"):
        from_file(text)


@pytest.mark.parametrize("word", ["off", "Off", "OFF", "'off'"])
def test_off_in_the_file_needs_no_quotes(word: str, from_file: Callable[[str], Settings]) -> None:
    """YAML takes it for false, and for this setting it is a mode."""
    assert from_file(f"pause_on_update: {word}").pause_on_update is PauseOnUpdate.OFF


@pytest.mark.parametrize("text", ["pause_on_update: on", "gate: {mode: off}", "name: off"])
def test_other_truth_values_are_no_words(text: str, from_file: Callable[[str], Settings]) -> None:
    """Only a setting that can be `off` reads false so."""
    with pytest.raises(SettingsError, match=r"not (True|False)$"):
        from_file(text)


async def test_a_restart_command_fills_in_what_is_taken_at_the_start(tmp_path: Path) -> None:
    """Each placeholder is one that a restart replaces."""
    told = tmp_path / "told"
    names = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    command = f"sh -c 'echo $* > {told}' sh {names}"
    assert from_environment(RESTART__COMMAND=command).restart.command == command
    replica = Replica(id="host.test:9", url="http://host.test:9")
    await CommandRestart(command, timeout_s=10).restart(replica)
    assert told.read_text() == "host.test:9 http://host.test:9 host.test 9\n"


@pytest.mark.parametrize(
    "command",
    [
        "restart {id} {url} {host}:{port}",
        """sh -c 'kill ${PID} {id}'""",
        """curl -d '{"name": "{id}", "force": {}}' http://h""",
        "docker inspect --format {{ID}} {host}",
        "xargs -I{} echo {a,b}",
    ],
)
def test_braces_that_are_the_commands_own_are_left_to_it(command: str) -> None:
    """Shells, JSON and templates have theirs."""
    assert from_environment(RESTART__COMMAND=command).restart.command == command


def test_a_lease_shorter_than_its_renewal_is_refused() -> None:
    """It would be lost between two renewals, also if only one of the two was set."""
    with pytest.raises(SettingsError, match=r"LEASE_RENEW_S: must be below lease_s \(0\.5\)"):
        from_environment(TIMEOUTS__LEASE_S="0.5")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gate: {mod: hold}", "gate.mod in FILE: unknown setting; did you mean gate.mode?"),
        ("gates: {mode: hold}", "gates in FILE: unknown setting; did you mean gate?"),
        ("gate: hold", "gate in FILE: a group takes a mapping of names to values"),
        ("gate: {mode: held}", "gate.mode in FILE: should be 'hold' or 'reject', not 'held'"),
        ("- a", "FILE: must be a mapping of setting names to values"),
        ("a: b\nc: [", "FILE: not valid YAML in line 2"),
        ("name: 2026-13-45", "FILE: not valid YAML"),
        ("[" * 3000, "FILE: not valid YAML"),
        ("1: b", "1 in FILE: unknown setting; docs/settings.md lists all names"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_place(
    text: str, line: str, from_file: Callable[[str], Settings]
) -> None:
    """The same strictness for the file."""
    with pytest.raises(SettingsError) as caught:
        from_file(text)
    assert re.sub(r"/\S*fleet\.yaml", "FILE", str(caught.value)) == line


def test_an_empty_file_sets_nothing(from_file: Callable[[str], Settings]) -> None:
    """Nor does a group with nothing in it."""
    assert from_file("") == from_file("gate:\n# mode: hold\n") == Settings()


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """A file that was named must be there."""
    with pytest.raises(SettingsError, match=r"absent\.yaml: cannot be read: "):
        load_settings(environ={}, flags={}, config=tmp_path / "absent.yaml")


def test_an_unknown_flag_is_refused() -> None:
    """The command line's own checks are not relied on."""
    with pytest.raises(SettingsError, match=r"^--prot: unknown setting; did you mean --port\?$"):
        load_settings(environ={}, flags={"prot": 1}, config=None)


def test_a_bad_flag_is_named_as_it_was_written() -> None:
    """Not as the variable of the same meaning."""
    with pytest.raises(SettingsError, match=r"^--replica: 'x' is not a URL"):
        load_settings(environ={}, flags={"replicas": ["x"]}, config=None)


def test_a_topology_is_json_in_the_environment_and_plain_in_the_file(
    from_file: Callable[[str], Settings],
) -> None:
    """Servers may be given by URL or by id, and are kept by id."""
    one = from_environment(
        TOPOLOGY='[{"replicas": ["http://A", "b:2"], "kind": "data_parallel", "world_size": 2}]'
    )
    two = from_file("topology: [{replicas: 'a:80,b:2', kind: data_parallel, world_size: 2}]")
    assert one.topology == two.topology
    assert one.topology[0].replicas == ("a:80", "b:2")


@pytest.mark.parametrize(
    ("topology", "line"),
    [
        ('[{"replica": ["a:1"]}]', "replica in FLEET_TOPOLOGY: unknown setting; did you mean"),
        ('[{"replicas": []}]', "FLEET_TOPOLOGY[0].replicas: "),
        ('[{"kind": "independent"}]', "FLEET_TOPOLOGY[0].replicas: Field required"),
        ('[{"replicas": ["a:1"], "kind": "x"}]', "FLEET_TOPOLOGY[0].kind: should be 'independent'"),
        ('[{"replicas": ["a:1"], "world_size": 0}]', "FLEET_TOPOLOGY[0].world_size: should be gr"),
        ('[{"replicas": ["a:1"]}, {"replicas": ["a:1"]}]', "FLEET_TOPOLOGY: replica a:1 is listed"),
    ],
)
def test_a_bad_topology_names_the_entry(topology: str, line: str) -> None:
    """Which one of several deployments was wrong."""
    with pytest.raises(SettingsError) as caught:
        from_environment(TOPOLOGY=topology)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("token", ["", " ", "a b", "a\n", "é"])
@pytest.mark.parametrize("name", list(Auth.model_fields))
def test_a_token_that_no_header_can_carry_is_refused_unseen(name: str, token: str) -> None:
    """An empty one above all: a missing secret must not open the door."""
    with pytest.raises(SettingsError) as caught:
        from_environment(**{f"AUTH__{name.upper()}": token})
    assert str(caught.value) == (
        f"FLEET_AUTH__{name.upper()}: "
        "a token is not empty and has printable ASCII characters only, no spaces"
    )


def test_secrets_do_not_show(from_file: Callable[[str], Settings]) -> None:
    """Neither in what operators see, nor in a log of the settings, nor in a bad file's line."""
    settings = from_environment(
        STORE="redis://u:hidden@h:1/2", AUTH__TRAINER_TOKEN="hidden", AUTH__REPLICA_TOKEN="hidden"
    )
    public = settings.public()
    assert public["store"] == "redis://h:1/2"
    assert public["auth"]["trainer_token"] == "**********"
    assert public["auth"]["operator_token"] is None
    assert "hidden" not in f"{public} {settings!r} {settings}"
    for text in ("auth: {trainer_token: hidden, x: [}", "auth: {trainer_token: [hidden]}"):
        with pytest.raises(SettingsError) as caught:
            from_file(text)
        assert "hidden" not in str(caught.value)


def test_public_settings_are_plain_values() -> None:
    """They are sent as JSON."""
    public: dict[str, Any] = Settings().public()
    assert public["pause_on_update"] == "keep"
    assert public["gate"]["mode"] == "hold"


def test_settings_cannot_be_changed_after_they_were_built() -> None:
    """They are passed around; nobody may bend them for the others."""
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        settings.gate.max_held = 1  # pyright: ignore[reportAttributeAccessIssue]


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_positive_time_survives_the_environment(seconds: float) -> None:
    """What is written is what holds."""
    settings = from_environment(GATE__TIMEOUT_S=repr(seconds))
    assert math.isclose(settings.gate.timeout_s, seconds)


def test_every_setting_says_what_it_means() -> None:
    """A name alone is no documentation."""
    assert [name for name, field in setting_names().items() if not field.description] == []


def test_the_page_of_settings_is_up_to_date() -> None:
    """docs/settings.md is what the generator would write."""
    generator = runpy.run_path(str(DOCS / "generate_settings.py"))
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert page == generator["render"](), "run: python docs/generate_settings.py"
