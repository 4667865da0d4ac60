"""``kvrouter operator preflight`` on a control plane."""

import subprocess
import sys

from tests.system.cluster.control_plane import ControlPlane

ENDS_WITHIN_S = 120.0


def preflight(plane: ControlPlane) -> tuple[int, str]:
    """Its exit code, and what it wrote."""
    argv = [sys.executable, "-m", "kvrouter.cli", "operator", "preflight", "--kubeconfig", str(plane.admin)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
    return done.returncode, done.stdout
