"""``kvrouter topology wait``: hold a pod's engine back until the pod knows where it landed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvrouter.core.errors import ConfigError, TopologyUnavailable
from kvrouter.worker.topology_env import (
    DEFAULT_MOUNT_PATH,
    ENABLED,
    MOUNT_PATH,
    name_problem,
    parse_topology_env,
)
from kvrouter.worker.topology_files import Reading, read_domains

POLL_S = 0.25
SAY_EVERY_S = 5.0
LABEL_PREFIX = "grove.io/topology."


@dataclass(frozen=True, slots=True)
class Awaited:
    """The levels whose files must have a value, in ``folder``; none when topology is off.

    ``labels`` are the pod labels that the files show, by level, for what is told of them; a level that is not
    among them has ``grove.io/topology.<level>``.
    """

    folder: Path
    levels: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    def label(self, level: str) -> str:
        """Return the pod label that the file of ``level`` shows."""
        return self.labels.get(level, f"{LABEL_PREFIX}{level}")


def awaited(
    environ: Mapping[str, str],
    *,
    mount_path: str | None = None,
    levels: str | None = None,
    labels: tuple[str, ...] = (),
) -> Awaited:
    """Return what to wait for: what is given, else what a worker with this environment would wait for.

    ``levels`` have commas between, ``labels`` are ``level=key``. Raises ConfigError, naming the option or the
    variable, for what cannot be.
    """
    by_level = dict(_label(text) for text in labels)
    folder = mount_path or environ.get(MOUNT_PATH, "").strip() or DEFAULT_MOUNT_PATH
    if levels is not None:
        return Awaited(Path(folder), _levels(levels), by_level)
    domain = parse_topology_env(environ).awaited_domain
    return Awaited(Path(folder), () if domain is None else (domain,), by_level)


def wait_for_levels(
    wanted: Awaited,
    *,
    timeout_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Reading:
    """Return what the folder says once every wanted level has a value; ``say``, meanwhile, what is awaited.

    Raises TopologyUnavailable after ``timeout_s`` seconds: it names the levels, their labels and the causes.
    """
    if not wanted.levels:
        say(f"Topology is off ({ENABLED} is not true), and no --levels are given: nothing to wait for.")
        return Reading({}, {})
    began_s = clock()
    say_at_s = began_s
    while True:
        reading = read_domains(wanted.folder)
        missing = [level for level in wanted.levels if level not in reading.domains]
        if not missing:
            values = ", ".join(f"{level}={reading.domains[level]}" for level in wanted.levels)
            say(f"{wanted.folder} is there after {clock() - began_s:.1f} s: {values}")
            return reading
        now_s = clock()
        left_s = began_s + timeout_s - now_s
        if left_s <= 0:
            raise TopologyUnavailable(_never_came(wanted, missing, reading, timeout_s), param=missing[0])
        if now_s >= say_at_s:
            say_at_s = now_s + SAY_EVERY_S
            say(f"waiting for {_files(wanted, missing)}; found {reading.describe()}; {left_s:.0f} s left")
        sleep(min(POLL_S, left_s))


def _files(wanted: Awaited, missing: list[str]) -> str:
    return ", ".join(f"{wanted.folder}/{level} (pod label {wanted.label(level)})" for level in missing)


def _never_came(wanted: Awaited, missing: list[str], reading: Reading, timeout_s: float) -> str:
    """One line for what is missing, and one for each usual cause, with the command that shows it."""
    labels = [wanted.label(level) for level in missing]
    return "\n".join(
        (
            f"no value for {_files(wanted, missing)} after {timeout_s:g} s; found {reading.describe()}",
            "the engine is not started, since nobody would know where its KV is. The usual causes:",
            "1. the pod's node lacks the node label of this level: kubectl get node NODE --show-labels",
            f"2. nothing copied it to the pod as {' and '.join(labels)} (kubectl get pod POD --show-labels): "
            "the operator or its policy on pods/binding does not run, or leaves this namespace out",
            f"3. the pod's volume has no such file in {wanted.folder}: the level is not in the cluster's "
            "topology, or the mount path is another one",
        )
    )


def _levels(text: str) -> tuple[str, ...]:
    levels = tuple(level.strip() for level in text.split(","))
    for level in levels:
        problem = name_problem(level)
        if problem is not None:
            raise ConfigError(f"--levels: {level!r} in {text!r} {problem}", param="levels")
    return tuple(dict.fromkeys(levels))


def _label(text: str) -> tuple[str, str]:
    level, equals, key = text.partition("=")
    if not (level and equals and key):
        raise ConfigError(f"--label: {text!r} is not LEVEL=KEY", param="label")
    return level, key
