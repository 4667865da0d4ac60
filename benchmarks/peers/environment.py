"""The peers' environment: made once, and made again when its requirements change."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.frontend.rounds import GatewayCommand
from benchmarks.sides import ROOT

FOLDER = ROOT / ".bench-venv"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
ALONE = Path(__file__).parent / "requirements-no-deps.txt"
_INSTALLED = FOLDER / "installed.txt"


def ensure_environment() -> Path:
    """Return the interpreter of the peers' environment, which is made if it must be.

    Raises ``CalledProcessError`` when a package cannot be installed.
    """
    python = FOLDER / "bin" / "python"
    wanted = REQUIREMENTS.read_text(encoding="utf-8") + ALONE.read_text(encoding="utf-8")
    if _INSTALLED.is_file() and _INSTALLED.read_text(encoding="utf-8") == wanted:
        return python
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True)
    subprocess.run([*install, "--no-deps", "-r", str(ALONE)], check=True)
    _INSTALLED.write_text(wanted, encoding="utf-8")
    return python


def gateway_commands(python: Path) -> tuple[GatewayCommand, ...]:
    """Return the gateways of the environment, which pass bytes on without reading tokens."""
    return (
        GatewayCommand("sglang-router", (str(python), "-m", "sglang_router.launch_router")),
        GatewayCommand("vllm-router", (str(python.with_name("vllm-router")),)),
    )


def gateway_versions(python: Path) -> dict[str, str]:
    """Return the versions that the environment has of them."""
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        check=True,
        capture_output=True,
    )
    packages = {package["name"]: package["version"] for package in json.loads(listed.stdout)}
    return {command.name: packages[command.name] for command in gateway_commands(python)}
