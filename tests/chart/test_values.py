"""Values: what the schema refuses, what contradicts itself, and what the rest turns into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import load_settings
from tests.chart.helm import CHART, HELMS, RELEASE, HelmFailed, environment, helm, render
from tests.chart.values_schema import SCHEMA
from tests.chart.values_schema import render as schema_text

MORE = r"more than one gateway \(or worker\) needs a shared store"
DIGEST = "sha256:" + "b" * 64


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("gateway.repicas=2", "repicas"),
        ("gateways={}", "gateways"),
        ('gateway.settings={"gate": {"timeout": 5}}', "timeout"),
        ('gateway.settings={"port": 9}', "port"),
        ('gateway.settings={"gate": {"mode": "drop"}}', "mode"),
        ("replicas.gpu.count=0.5", "count"),
        ('replicas.gpu.count="2"', "count"),
        ("replicas.gpu.count=-1", "count"),
        ('replicas.resources={"limits": {"nvidia.com/gpu": 0.5}}', "gpu"),
        ('replicas.resources={"limits": {"nvidia.com/mig-1g.5gb": "0.5"}}', "mig-1g.5gb"),
        ("replicas.port=70000", "port"),
        ('gateway.image.tag="latest"', "tag"),
        ('replicas.image.digest="sha256:abc"', "digest"),
        ('replicas.shm.size="16 GB"', "size"),
        ("replicas.count=1.5", "count"),
        ("gateway.replicas=0", "replicas"),
        ('auth.operatorToken="two words"', "operatorToken"),
        ('fullnameOverride="Fleet"', "fullnameOverride"),
        ('discovery.kind="consul"', "kind"),
        ('redis.auth.password="a/b"', "password"),
    ],
)
def test_the_schema_refuses(name: str, value: str, where: str) -> None:
    """Unknown keys, wrong types, fractions of a GPU and `latest` stop the install, named."""
    with pytest.raises(HelmFailed, match=where):
        render("default", value, by=name)


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(
    ("shape", "values", "said"),
    [
        ("default", ["redis.enabled=false"], MORE),
        (
            "one-gpu-node",
            ["gateway.autoscaling.enabled=true"],
            MORE,
        ),
        ("one-gpu-node", ["gateway.settings.workers=4"], MORE),
        ("default", ['store.url="redis://there:6379"'], "one store is enough"),
        ("external-redis", ['store.url="redis://there:6379"'], "set one of them"),
        ("default", ['auth.existingSecret="tokens"'], "auth.secretKeys"),
        ("default", ['auth.secretKeys.trainer="t"'], "set auth.existingSecret"),
        ("external-fleet-urls", ['auth.trainerToken="x"'], "not from both"),
        ("default", ['discovery.kind="static"'], "replicas.enabled=false"),
        ("default", ['discovery.kubernetes.selector="a=b"'], "replicas.enabled=false"),
        ("external-fleet-urls", ["discovery.urls=[]"], "discovery.urls"),
        ("external-fleet-dns", ['discovery.dns.host=""'], "discovery.dns.host"),
        ("external-fleet-selector", ['discovery.kubernetes.selector=""'], "which pods"),
        ("external-fleet-dns", ["discovery.kubernetes.restart=true"], "restart"),
        ("default", ["replicas.tensorParallelSize=2"], "is 2, the pods of one replica have 1"),
        ("multi-node", ["replicas.multiNode.size=3"], "is 16, the pods of one replica have 24"),
        ("default", ['replicas.modelCache.kind="shared"'], "ReadWriteOnce"),
        ("default", ['replicas.modelCache.kind="existingClaim"'], "name the claim"),
        ("multi-node", ['replicas.modelCache.kind="perReplica"'], "not with multiNode"),
        ("default", ["replicas.startupProbe.failureThreshold=179"], "allows 1790 s for loading"),
        ("default", ["replicas.livenessProbe.failureThreshold=60"], "gives up after 1800 s"),
        (
            "default",
            ['gateway.settings={"timeouts": {"update_s": 7200}}'],
            "a collective may take 7200 s",
        ),
        ("keda", ["replicas.keda.triggers=[]"], "say by what to scale"),
        ("keda", ["replicas.multiNode.enabled=true", "replicas.gpu.count=0"], "LeaderWorkerSet"),
    ],
)
def test_contradictions_stop_the_install(
    name: str, shape: str, values: list[str], said: str
) -> None:
    """One line that names the values and says what to do."""
    with pytest.raises(HelmFailed, match=said):
        render(shape, *values, by=name)


def test_the_schema_knows_every_setting_of_the_gateway() -> None:
    """`python -m tests.chart.values_schema` was run after settings changed (make chart-docs)."""
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("where", ["", "gateway", "replicas", "redis", "networkPolicy.gateway"])
def test_every_value_has_a_schema_of_its_own(where: str) -> None:
    """No value is let through only because the schema says nothing about it."""
    schema, values = (
        json.loads(SCHEMA.read_text()),
        yaml.safe_load((CHART / "values.yaml").read_text()),
    )
    for key in filter(None, where.split(".")):
        schema, values = schema["properties"][key], values[key]
    assert schema["additionalProperties"] is False
    assert set(values) == set(schema["properties"])


@pytest.mark.parametrize("name", HELMS)
def test_the_gateway_takes_the_settings_that_are_rendered(name: str) -> None:
    """Numbers, booleans, enums and lists arrive as the gateway's own loader wants them."""
    settings: dict[str, Any] = {
        "auto_version": False,
        "pause_on_update": "wait",
        "gate": {"max_held_bytes": 123456789012, "timeout_s": 0.25},
        "log": {"access": None},
        "topology": [{"replicas": ["a:1", "b:1"], "kind": "data_parallel", "world_size": 4}],
    }
    container = render(
        "external-fleet-urls", f"gateway.settings={json.dumps(settings)}", by=name
    ).container("gateway")
    given = {k: v for k, v in environment(container).items() if isinstance(v, str)}
    loaded = load_settings(environ=given | {"FLEET_STORE": "memory://"}, flags={}, config=None)
    assert loaded.auto_version is False
    assert loaded.pause_on_update == "wait"
    assert loaded.gate.max_held_bytes == 123456789012
    assert loaded.gate.timeout_s == 0.25
    assert loaded.log.access is None
    assert loaded.topology[0].replicas == ("a:1", "b:1")
    assert loaded.topology[0].world_size == 4
    assert loaded.replicas == ("http://10.0.0.7:8000", "http://10.0.0.8:8000")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            "default",
            {
                "FLEET_DISCOVERY": "kubernetes",
                "FLEET_KUBERNETES__NAMESPACE": "train",
                "FLEET_KUBERNETES__PORT": "8000",
                "FLEET_KUBERNETES__RESTART": "false",
            },
        ),
        (
            "external-fleet-selector",
            {
                "FLEET_DISCOVERY": "kubernetes",
                "FLEET_KUBERNETES__NAMESPACE": "rollouts",
                "FLEET_KUBERNETES__SELECTOR": "app=vllm,role=rollout",
                "FLEET_KUBERNETES__PORT": "8080",
                "FLEET_KUBERNETES__RESTART": "true",
            },
        ),
        (
            "external-redis",
            {
                "FLEET_DISCOVERY": "dns",
                "FLEET_DNS__HOST": "rl-vllm-fleet-gateway-replicas.train.svc.cluster.local",
                "FLEET_DNS__PORT": "8000",
            },
        ),
        (
            "external-fleet-dns",
            {
                "FLEET_DISCOVERY": "dns",
                "FLEET_DNS__HOST": "vllm.rollouts.svc.cluster.local",
                "FLEET_DNS__PORT": "8000",
            },
        ),
        (
            "external-fleet-urls",
            {
                "FLEET_DISCOVERY": "static",
                "FLEET_REPLICAS": "http://10.0.0.7:8000,http://10.0.0.8:8000",
            },
        ),
    ],
)
@pytest.mark.parametrize("name", HELMS)
def test_the_gateway_is_told_where_replicas_are(
    name: str, shape: str, expected: dict[str, str]
) -> None:
    """Exactly the settings of that kind of discovery, and none of another."""
    found = environment(render(shape, by=name).container("gateway"))
    place = ("FLEET_DISCOVERY", "FLEET_DNS", "FLEET_KUBERNETES", "FLEET_REPLICAS")
    shown = {k: v for k, v in found.items() if k.startswith(place)}
    selector = shown.pop("FLEET_KUBERNETES__SELECTOR", None)
    if "FLEET_KUBERNETES__SELECTOR" in expected:
        shown["FLEET_KUBERNETES__SELECTOR"] = selector
    assert shown == expected


def test_the_selector_finds_the_replicas_and_nothing_else() -> None:
    """Workers of a replica that spans nodes, which answer no HTTP, are not found either."""
    for shape in ("default", "multi-node"):
        chart = render(shape)
        selector = environment(chart.container("gateway"))["FLEET_KUBERNETES__SELECTOR"]
        wanted = dict(part.split("=") for part in selector.split(","))
        found = [
            t["metadata"]["labels"]["app.kubernetes.io/component"]
            for t in chart.templates()
            if wanted.items() <= t["metadata"]["labels"].items()
        ]
        assert found == ["replica"]


def test_one_gateway_without_redis_is_never_two_at_once() -> None:
    """A rolling update would run two gateways with a memory each on the same replicas."""
    deployment = render("one-gpu-node").one("Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert environment(deployment["spec"]["template"]["spec"]["containers"][0])["FLEET_STORE"] == (
        "memory://"
    )


def test_an_autoscaled_deployment_names_no_number() -> None:
    """Or each upgrade would undo what the autoscaler did."""
    assert "replicas" not in render("eight-replicas-tp2").one("Deployment")["spec"]
    assert "replicas" not in render("keda").one("StatefulSet", "replica")["spec"]
    assert render().one("Deployment")["spec"]["replicas"] == 2


def test_tokens_are_in_secrets_and_nowhere_else() -> None:
    """No token, password or URL with one stands in a pod template or a ConfigMap."""
    for shape, secrets in (("eight-replicas-tp2", ("-secret",)), ("keda", ("user:secret",))):
        for manifest in render(shape).manifests:
            if manifest["kind"] != "Secret":
                assert not any(f"'{s}" in str(manifest) for s in secrets), manifest["kind"]
                assert "user:secret" not in str(manifest)
                assert "trainer-secret" not in str(manifest)


def test_a_digest_goes_before_a_tag() -> None:
    """An image is named by its digest where there is one."""
    container = render("default", f'replicas.image.digest="{DIGEST}"').container("replica")
    assert container["image"] == f"docker.io/vllm/vllm-openai@{DIGEST}"


@pytest.mark.parametrize("what", ["version", "gateway image", "settings"])
def test_an_upgrade_of_the_gateway_restarts_no_model_server(what: str, tmp_path: Path) -> None:
    """Loading a model takes half an hour: a new chart or gateway leaves the replicas alone."""
    before = render("eight-replicas-tp2")
    if what == "version":
        helm("helm4", "package", str(CHART), "--version=9.9.9", "--app-version=9.9.9",
             "--destination", str(tmp_path))  # fmt: skip
        after = render("eight-replicas-tp2", chart=next(tmp_path.glob("*.tgz")))
        assert "9.9.9" in after.one("Deployment")["metadata"]["labels"]["helm.sh/chart"]
    elif what == "settings":
        after = render("eight-replicas-tp2", "gateway.settings.gate.timeout_s=1")
    else:
        after = render("eight-replicas-tp2", 'gateway.image.digest=""', 'gateway.image.tag="9"')
    assert after.template("replica") == before.template("replica")
    assert after.one("Deployment")["spec"] != before.one("Deployment")["spec"] or what == "version"


def test_a_changed_token_restarts_the_gateway() -> None:
    """Tokens are read at the start only."""
    before = render("eight-replicas-tp2").template("gateway")
    after = render("eight-replicas-tp2", 'auth.trainerToken="other"').template("gateway")
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]


def test_extra_objects_are_rendered_with_templates() -> None:
    """Objects and texts, both with the release's own names in them."""
    found = {m["metadata"]["name"]: m for m in render("eight-replicas-tp2").of_kind("ConfigMap")}
    assert found[f"{RELEASE}-more"]["data"] == {"fleet": "train-rl"}
    assert f"{RELEASE}-text" in found


def test_names_can_be_replaced() -> None:
    """nameOverride changes labels, fullnameOverride every name, and selectors still match."""
    chart = render("default", 'fullnameOverride="policy"', 'nameOverride="rollout"')
    names = {m["metadata"]["name"] for m in chart.manifests}
    assert all(name.startswith("policy") for name in names), names
    labels = chart.template("replica")["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "rollout"


def test_long_names_still_fit() -> None:
    """A release name of 53 characters, Helm's limit, leaves room for suffixes and ordinals."""
    release = "r" * 53
    text = helm("helm4", "template", release, str(CHART))
    for manifest in filter(None, yaml.safe_load_all(text)):
        assert len(manifest["metadata"]["name"]) <= 52, manifest["metadata"]["name"]


def test_the_notes_say_what_comes_next() -> None:
    """Three commands, and a warning for each door that is open."""
    notes = helm("helm4", "install", RELEASE, str(CHART), "--dry-run=client").partition("NOTES:")[2]
    assert notes.count("kubectl") == 3
    assert "No token is set" in notes
    values = str(CHART / "ci/external-fleet-urls-values.yaml")
    closed = helm("helm4", "install", RELEASE, str(CHART), "--dry-run=client", "-f", values)
    assert "No token is set" not in closed
    assert "networkPolicy.enabled=false" in closed
