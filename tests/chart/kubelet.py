"""What a kubelet does with a rendered container, as far as a process can: env, arguments, probes.

Nothing is inherited but PATH; what stands in the manifest is what runs. Only what a test
substitutes (names of hosts, paths of volumes) differs.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.chart.helm import Chart, Manifest
from tests.waiting import wait_until

_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")


@dataclass(frozen=True)
class Node:
    """Where containers run: what the pod's fields are, and what is written in place of what."""

    chart: Chart
    log: Path
    substitutes: Mapping[str, str]
    pod_ip: str = "127.0.0.1"

    def environment(self, container: Manifest) -> dict[str, str]:
        """Resolve a container's variables in their order: Secrets, fields, references."""
        found: dict[str, str] = {}
        for variable in container["env"]:
            text = variable.get("value")
            if text is None:
                text = self._from(variable.get("valueFrom", {}))
            found[variable["name"]] = self._substituted(expand(text, found))
        return found

    def command(self, container: Manifest) -> list[str]:
        """Resolve a container's command and arguments."""
        variables = self.environment(container)
        words = [*container["command"], *container.get("args", [])]
        return [self._substituted(expand(word, variables)) for word in words]

    @asynccontextmanager
    async def running(self, container: Manifest) -> AsyncGenerator[asyncio.subprocess.Process]:
        """Run a container's command; it is killed if it is still there at the end."""
        search = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        with self.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self.command(container),
                env={"PATH": search, **self.environment(container)},
                cwd=self.log.parent,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def passes(self, container: Manifest, probe: str) -> None:
        """Wait until a container's HTTP probe passes."""
        action = container[probe]["httpGet"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        url = f"http://{self.pod_ip}:{ports[action['port']]}{action['path']}"

        async def answers() -> bool:
            try:
                async with httpx.AsyncClient(trust_env=False) as http:
                    answer = await http.get(url, timeout=container[probe]["timeoutSeconds"])
            except httpx.HTTPError:
                return False
            return 200 <= answer.status_code < 400

        try:
            await wait_until(answers, timeout_s=30)
        except TimeoutError:
            raise AssertionError(f"{url} does not pass:\n{self.log.read_text()}") from None

    def _from(self, source: dict[str, Any]) -> str:
        if "fieldRef" in source:
            assert source["fieldRef"] == {"fieldPath": "status.podIP"}
            return self.pod_ip
        wanted = source["secretKeyRef"]
        secrets = {m["metadata"]["name"]: m["data"] for m in self.chart.of_kind("Secret")}
        return base64.b64decode(secrets[wanted["name"]][wanted["key"]]).decode()

    def _substituted(self, text: str) -> str:
        for written, meant in self.substitutes.items():
            text = text.replace(written, meant)
        return text


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by a variable's value, and leave what is none, as a kubelet does."""
    return _REFERENCE.sub(lambda m: variables.get(m[1], m[0]), text)


def without_fleet() -> dict[str, str]:
    """This process's own environment, without what a gateway would take for settings."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
