"""Worker topology: reads a worker's topology files, waits for them at the start, and watches them afterwards.

The folder is usually a Kubernetes volume: its files are links into a hidden folder, ``..data``, which the
kubelet replaces as a whole.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError, TopologyUnavailable
from kvrouter.core.taints import worker_taints
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.kernel.topology.policy import validate_runtime_config
from kvrouter.worker.topology_env import (
    DEFAULT_MOUNT_PATH,
    ENABLED,
    LEVELS,
    MOUNT_PATH,
    VALUE_CHARS_MAX,
    TopologyEnv,
    name_problem,
    parse_topology_env,
    value_problem,
)

_EXCHANGED = "..data"
_READS_MAX = 3
_BYTES_MAX = 4 * VALUE_CHARS_MAX + 1024
"""More bytes than any legal value and surrounding blanks."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """A folder's content at one moment. ``domains`` are sorted by name; ``passed_over`` has the reason for
    each skipped entry, by name.

    ``warnings`` are about entries that were meant as values; empty files, hidden files and folders are
    skipped without one.
    """

    domains: Mapping[str, str]
    passed_over: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """The values and skipped entries in one line."""
        parts = [f"{name}={value}" for name, value in self.domains.items()]
        parts += [f"{name} {why}" for name, why in self.passed_over.items()]
        return ", ".join(parts) or "nothing"


def read_domains(folder: Path) -> FolderReading:
    """Read every file of ``folder``. A missing or unreadable folder has no domains.

    A folder that is replaced meanwhile is read again, so that values of two versions do not mix.
    """
    for _ in range(_READS_MAX - 1):
        before = _exchange_mark(folder)
        reading = _read_once(folder)
        if _exchange_mark(folder) == before:
            return reading
    return _read_once(folder)


def _exchange_mark(folder: Path) -> str | None:
    try:
        return str((folder / _EXCHANGED).readlink())
    except OSError:
        return None


def _read_once(folder: Path) -> FolderReading:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        return FolderReading({}, {str(folder): "does not exist"})
    except OSError as error:
        why = f"cannot be listed: {error.strerror}"
        return FolderReading({}, {str(folder): why}, (f"{folder} {why}",))
    domains: dict[str, str] = {}
    passed_over: dict[str, str] = {}
    warnings: list[str] = []
    for entry in entries:
        value, problem, is_meant = _read_value(entry)
        if problem is None:
            domains[entry.name] = value
            continue
        passed_over[entry.name] = problem
        if is_meant:
            warnings.append(f"{entry} {problem}")
    return FolderReading(domains, passed_over, tuple(warnings))


def _read_value(entry: Path) -> tuple[str, str | None, bool]:
    """The trimmed value, why it is unusable (None: it is usable), and whether that deserves a warning."""
    try:
        if not entry.is_file():
            return "", "is not a file", False
        with entry.open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
        if len(content) > _BYTES_MAX:
            return "", f"is longer than {VALUE_CHARS_MAX} characters", True
        value = content.decode().strip()
    except FileNotFoundError:
        return "", "has just vanished", False
    except OSError as error:
        return "", f"cannot be read: {error.strerror}", True
    except UnicodeDecodeError:
        return "", "is not UTF-8", True
    if not value:
        return "", "is empty", False
    problem = name_problem(entry.name)
    if problem is not None:
        return "", f"cannot be a domain: its name {problem}", True
    problem = value_problem(value)
    return value, problem, problem is not None


Sleep = Callable[[float], Awaitable[None]]
OnChange = Callable[[ModelRuntimeConfig, tuple[str, ...]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of ``kvrouter topology check``. ``config`` is None when the worker would not start."""

    text: str
    exit_code: int
    config: ModelRuntimeConfig | None
    warnings: tuple[str, ...] = ()


async def wait_for_topology(
    env: TopologyEnv, *, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep
) -> FolderReading:
    """Return the files' content once the awaited domain has a value; at once when topology is off.

    Raises TopologyUnavailable after ``env.timeout_s`` seconds, naming path, domain and the values found.
    """
    if env.awaited_domain is None:
        return FolderReading({}, {})
    deadline_s = clock() + env.timeout_s
    while True:
        reading = await asyncio.to_thread(read_domains, env.mount_path)
        if env.awaited_domain in reading.domains:
            return reading
        left_s = deadline_s - clock()
        if left_s <= 0:
            raise TopologyUnavailable(
                f"{_missing(env, reading)}; waited {env.timeout_s:g} s", param=env.awaited_by
            )
        await sleep(min(env.poll_s, left_s))


def topology_config(
    config: ModelRuntimeConfig, env: TopologyEnv, reading: FolderReading
) -> ModelRuntimeConfig:
    """Return ``config`` with the worker's domains and transfer policy; unchanged when topology is off."""
    if not env.enabled:
        return config
    return replace(
        config,
        topology_domains=dict(reading.domains),
        topology_levels=env.levels,
        kv_transfer_domain=env.transfer_domain,
        kv_transfer_enforcement=env.enforcement,
        kv_transfer_preferred_weight=env.preferred_weight,
    )


async def watch_topology(
    env: TopologyEnv, config: ModelRuntimeConfig, on_change: OnChange, *, sleep: Sleep = asyncio.sleep
) -> None:
    """Read the files every ``env.poll_s`` seconds and pass each change to ``on_change``; until cancelled.

    ``config`` was published last. A removed value is passed on as removed, with a warning: the worker's
    location then counts as unknown, and a required transfer policy fails closed.
    """
    while env.enabled:
        await sleep(env.poll_s)
        reading = await asyncio.to_thread(read_domains, env.mount_path)
        changed = topology_config(config, env, reading)
        if changed == config:
            continue
        warnings = reading.warnings
        if env.awaited_domain not in reading.domains:
            warnings += (_missing(env, reading),)
        try:
            await on_change(changed, warnings)
        except OSError:
            continue  # discovery is unreachable: the change is published after the next read
        config = changed


def topology_check(environ: Mapping[str, str]) -> CheckReport:
    """Report what a worker with this environment would publish now, or why it would not start."""
    try:
        env = parse_topology_env(environ)
        if not env.enabled:
            return _report(f"Topology is off ({ENABLED} is not true): nothing is published.", env.warnings)
        reading = read_domains(env.mount_path)
        warnings = env.warnings + reading.warnings + _levels_without_value(env, reading)
        if env.awaited_domain not in reading.domains:
            wait = f"a worker waits {env.timeout_s:g} s for it, then exits with code 1"
            return _refusal(f"{_missing(env, reading)}; {wait}", warnings)
        config = topology_config(ModelRuntimeConfig(), env, reading)
        warnings += tuple(validate_runtime_config(config))
    except ConfigError as error:
        return _refusal(error.message, ())
    published = msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
    taints = "\n".join(f"  {taint}" for taint in sorted(worker_taints(config)))
    return _report(f"A worker would publish:\n{published}\nand carry the taints:\n{taints}", warnings, config)


def _levels_without_value(env: TopologyEnv, reading: FolderReading) -> tuple[str, ...]:
    """A warning for each level without a value: a misspelt level is otherwise ignored in distances."""
    found = reading.describe()
    return tuple(
        f"{LEVELS}: {env.mount_path}/{level} has no value for the level '{level}' (found {found})"
        for level in env.levels
        if level not in reading.domains and level != env.awaited_domain
    )


def _report(text: str, warnings: tuple[str, ...], config: ModelRuntimeConfig | None = None) -> CheckReport:
    return CheckReport(_with_warnings(text, warnings), 0, config or ModelRuntimeConfig(), warnings)


def _refusal(why: str, warnings: tuple[str, ...]) -> CheckReport:
    return CheckReport(_with_warnings(f"A worker would not start: {why}", warnings), 1, None, warnings)


def _with_warnings(text: str, warnings: tuple[str, ...]) -> str:
    return "\n".join([text, *(f"warning: {warning}" for warning in warnings)])


def _missing(env: TopologyEnv, reading: FolderReading) -> str:
    return (
        f"{env.awaited_by}={env.awaited_domain}: {env.mount_path}/{env.awaited_domain} has no value "
        f"(found {reading.describe()})"
    )


POLL_S = 0.25
SAY_EVERY_S = 5.0
LABEL_PREFIX = "grove.io/topology."


@dataclass(frozen=True, slots=True)
class Awaited:
    """The levels in ``folder`` whose files must have a value; empty when topology is off.

    ``labels`` are the pod labels behind the files, by level, for log messages; the default is
    ``grove.io/topology.<level>``.
    """

    folder: Path
    levels: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    def label(self, level: str) -> str:
        """Return the pod label behind the file of ``level``."""
        return self.labels.get(level, f"{LABEL_PREFIX}{level}")


def awaited(
    environ: Mapping[str, str],
    *,
    mount_path: str | None = None,
    levels: str | None = None,
    labels: tuple[str, ...] = (),
) -> Awaited:
    """Return the levels to wait for: the given ones, else those of a worker with this environment.

    ``levels`` are separated by commas, ``labels`` are ``level=key``. Raises ConfigError that names the
    invalid option or variable.
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
) -> FolderReading:
    """Return the folder's content once every awaited level has a value; report progress to ``say``.

    Raises TopologyUnavailable after ``timeout_s`` seconds: it names the levels, their labels and the causes.
    """
    if not wanted.levels:
        say(f"Topology is off ({ENABLED} is not true), and no --levels are given: nothing to wait for.")
        return FolderReading({}, {})
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


def _never_came(wanted: Awaited, missing: list[str], reading: FolderReading, timeout_s: float) -> str:
    """One line for the missing levels, and one for each usual cause with the command that shows it."""
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
