"""How long each test takes and how much processor time it uses, for ``make gate-times``.

A test that takes long and uses little waits for something: a process that starts, a timer, a lease that ends.
"""

import json
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from scripts.gate import FOLDER_VARIABLE

PROCESSES_LOOKED_FOR_S = 0.3
"""Processes that outlive a test are looked for only where it took this long: that takes milliseconds."""

_seen_cpu_s: dict[int, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write a line of JSON for each test: its wall time and processor time, fixtures included."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return (yield)
    started, own_cpu_s = time.monotonic(), _own_cpu_s()
    ran = yield
    wall_s = time.monotonic() - started
    cpu_s = _own_cpu_s() - own_cpu_s
    if wall_s >= PROCESSES_LOOKED_FOR_S:
        cpu_s += _running_cpu_s()
    line = {"test": item.nodeid, "wall_s": round(wall_s, 3), "cpu_s": round(max(cpu_s, 0.0), 3)}
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as times:
        times.write(json.dumps(line) + "\n")
    return ran


def _own_cpu_s() -> float:
    """The processor time of this process and of those children that have ended and were waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _running_cpu_s() -> float:
    """The processor time that running descendants have used since the last call; 0 where there is no /proc.

    What one used before its parent waited for it counts twice when it was seen here: it is taken off again.
    """
    parents, cpu_s = _process_table()
    descendants = {pid for pid in cpu_s if _descends(pid, parents)}
    used_s = sum(cpu_s[pid] - _seen_cpu_s.get(pid, 0.0) for pid in descendants)
    used_s -= sum(seen_s for pid, seen_s in _seen_cpu_s.items() if pid not in descendants)
    _seen_cpu_s.clear()
    _seen_cpu_s.update((pid, cpu_s[pid]) for pid in descendants)
    return used_s


def _process_table() -> tuple[dict[int, int], dict[int, float]]:
    """The parent and the processor time of each process on this machine."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    cpu_s: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        cpu_s[pid] = sum(int(ticks) for ticks in fields[11:15]) / ticks_per_s
    return parents, cpu_s


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 1:
        if pid == os.getpid():
            return True
    return False
