"""A Dockerfile read and carried out without Docker: its steps, in a folder instead of an image.

`RUN` goes through a shell with the image's absolute paths put into the folder; `COPY` honours
.dockerignore; a stage's own Python is a clean virtual environment that stands in for the base
image's. What needs an image (layers, users, the base itself) is not imitated.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chart.helm import ROOT
from tests.chart.kubelet import without_fleet

_OWN_PATH = re.compile(r"(?<![\w./])/(?=(?:opt|wheels|src|usr/local/bin)\b)")
_STAGE = re.compile(r"(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)


@dataclass
class Step:
    """One instruction: its name in capitals, and the rest, continuation lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The rest as a list, in the form of JSON where it has that."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()


@dataclass
class Stage:
    """The steps after one FROM."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list[Step])

    def last(self, name: str) -> Step:
        """Return the last step of this name."""
        return [step for step in self.steps if step.name == name][-1]


def read_stages(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile in their order; ARGs before the first are filled in."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for step in _steps(path.read_text()):
        if step.name == "FROM":
            match = _STAGE.fullmatch(step.text)
            assert match is not None, step.text
            base = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], match[1])
            stages.append(Stage(base, match[2] or ""))
        elif stages:
            stages[-1].steps.append(step)
        elif step.name == "ARG":
            name, _, value = step.text.partition("=")
            arguments[name] = value
    return stages


def _steps(text: str) -> Iterator[Step]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in joined.splitlines():
        name, _, rest = line.strip().partition(" ")
        yield Step(name.upper(), rest.strip())


class Image:
    """A folder in which the steps of one stage are carried out."""

    def __init__(self, folder: Path, stages: dict[str, Image]) -> None:
        self.folder = folder
        self._stages = stages
        self._work = folder
        self.variables: dict[str, str] = {}
        self.python = folder / "usr/local"
        subprocess.run([sys.executable, "-m", "venv", str(self.python)], check=True)

    def inside(self, path: str) -> str:
        """Return where an absolute path of the image is."""
        return f"{self.folder}{path}"

    def build(self, stage: Stage) -> None:
        """Carry out every step that does something."""
        for step in stage.steps:
            if step.name == "WORKDIR":
                self._work = Path(self.inside(step.text))
                self._work.mkdir(parents=True, exist_ok=True)
            elif step.name == "ENV":
                self.variables |= dict(re.findall(r"(\w+)=(\S+)", step.text))
            elif step.name == "COPY":
                self._copy(step)
            elif step.name == "RUN":
                self.run(["sh", "-ec", self._here(step.text)])

    def environment(self) -> dict[str, str]:
        """What commands see: the image's variables, its Python first, the machine's pip settings.

        pip may keep what it has downloaded here: an image has no next build, a checkout does.
        """
        search = f"/usr/local/bin:{os.defpath}"
        own = {**self.variables, "PATH": self.variables.get("PATH", search)}
        own["PATH"] = own["PATH"].replace("$PATH", search)
        own.pop("PIP_NO_CACHE_DIR", None)
        return {**without_fleet(), **{k: self._here(v) for k, v in own.items()}}

    def run(self, command: list[str]) -> str:
        """Run a command in the image's working directory and return what it said."""
        ended = subprocess.run(
            command,
            cwd=self._work,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, f"{command}:\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def _here(self, text: str) -> str:
        """Put the image's absolute paths into the folder; the machine's own stay."""
        return re.sub(
            r"(?<![\w./])/(?=(?:opt|wheels|src|usr/local/bin)\b)", f"{self.folder}/", text
        )

    def _copy(self, step: Step) -> None:
        words = step.words
        source: Path | None = None
        if words[0].startswith("--from="):
            source = self._stages[words.pop(0).partition("=")[2]].folder
        *names, target = words
        where = Path(self.inside(target)) if target.startswith("/") else self._work / target
        for name in names:
            found = ROOT / name if source is None else Path(f"{source}{name}")
            if source is None:
                assert in_context(name), f".dockerignore keeps {name} out"
            if found.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, where, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                where.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, where)


def in_context(path: str) -> bool:
    """Say whether .dockerignore lets a path into the build; the last rule that fits decides."""
    inside = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.strip().removeprefix("!")
        fits = fnmatch.fnmatch(path, rule) or path.startswith(f"{rule}/")
        if rule and not line.startswith("#") and fits:
            inside = line.startswith("!")
    return inside
