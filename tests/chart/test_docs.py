"""What is generated is up to date, and what documents name exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import yaml

from gateway.settings_model import Settings
from tests.chart.helm import CHART, TOOLS, render
from tests.gateway.serving import serve


def test_the_table_of_values_is_up_to_date(tmp_path: Path) -> None:
    """`make chart-docs` was run after values.yaml changed."""
    readme = tmp_path / "README.md"
    shutil.copy(CHART / "README.md", readme)
    generator = str(TOOLS / "node_modules/.bin/readme-generator")
    command = [generator, "--values", str(CHART / "values.yaml"), "--readme", str(readme)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert readme.read_text() == (CHART / "README.md").read_text()


def test_a_value_without_a_comment_is_found(tmp_path: Path) -> None:
    """The generator fails, so that no value stays undocumented."""
    values = tmp_path / "values.yaml"
    values.write_text((CHART / "values.yaml").read_text() + "\nunexplained: 1\n")
    readme = tmp_path / "README.md"
    shutil.copy(CHART / "README.md", readme)
    generator = str(TOOLS / "node_modules/.bin/readme-generator")
    command = [generator, "--values", str(values), "--readme", str(readme)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "unexplained" in ended.stdout + ended.stderr


def test_the_charts_version_of_the_gateway_is_this_one() -> None:
    """The default image has the tag of the program that was tested with the chart."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version("vllm-fleet-gateway")
    assert render().container("gateway")["image"].endswith(f":{chart['appVersion']}")


async def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every metric and label in a panel is one that a gateway exports."""
    (content,) = render("eight-replicas-tp2").one("ConfigMap", "gateway")["data"].values()
    dashboard = json.loads(content)
    queries = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    async with serve(Settings()) as served:
        exported = (await served.http.get("/metrics")).text
    known = set(re.findall(r"^# TYPE (\S+) ", exported, re.MULTILINE))
    assert len(queries) > 10
    for query in queries:
        for name in re.findall(r"\bfleet_\w+", query):
            assert name in known or re.sub(r"_(bucket|count|sum)$", "", name) in known, name
