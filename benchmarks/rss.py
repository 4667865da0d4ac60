"""This process's memory. Standard library alone, for the peers' side runs it too."""

import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS}: no VmRSS")


def trimmed_rss_bytes() -> int:
    """Return the resident memory once garbage is collected and the C heap gave back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes()
