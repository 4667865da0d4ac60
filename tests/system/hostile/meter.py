"""What an attack costs the process that is attacked: CPU time of its event loop, and memory."""

import re
import time
from pathlib import Path

MIB = 1 << 20

CPUCLOCK_SCHED = 2
"""Makes the id of a clock of a process's number: of its CPU time, in nanoseconds."""


class Meter:
    """Reads one process from ``/proc``. Times are in seconds, sizes in bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._pid = pid

    def loop_cpu_s(self) -> float:
        """CPU time of the main thread, which runs the event loop, since the process began."""
        ran_ns, _, _ = (self._folder / "task" / str(self._pid) / "schedstat").read_text().split()
        return int(ran_ns) / 1e9

    def cpu_s(self) -> float:
        """CPU time of all threads since the process began."""
        return time.clock_gettime(~self._pid << 3 | CPUCLOCK_SCHED)

    def resident_bytes(self) -> int:
        """Memory that the process holds now."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """The most memory that the process has held since :meth:`forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Let :meth:`peak_bytes` begin with the memory held now."""
        (self._folder / "clear_refs").write_text("5")

    def n_files(self) -> int:
        """Open file descriptors."""
        return len(list((self._folder / "fd").iterdir()))

    def _status(self, name: str) -> int:
        text = (self._folder / "status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.M)
        assert found is not None, text
        return int(found[1]) * 1024
