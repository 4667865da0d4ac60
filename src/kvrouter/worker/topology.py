"""A worker's place: waited for at the start, watched afterwards, and shown by ``kvrouter topology check``."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError, TopologyUnavailable
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.topology import validate_runtime_config, worker_taints
from kvrouter.worker.topology_env import ENABLED, LEVELS, TopologyEnv, parse_topology_env
from kvrouter.worker.topology_files import Reading, read_domains

Sleep = Callable[[float], Awaitable[None]]
OnChange = Callable[[ModelRuntimeConfig, tuple[str, ...]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What ``kvrouter topology check`` says. ``config`` is None when the worker would not start."""

    text: str
    exit_code: int
    config: ModelRuntimeConfig | None
    warnings: tuple[str, ...] = ()


async def wait_for_topology(
    env: TopologyEnv, *, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep
) -> Reading:
    """Return the files' content once the awaited domain has a value; at once when topology is off.

    Raises TopologyUnavailable, naming path, domain and what was found, when it has none after
    ``env.timeout_s`` seconds.
    """
    if env.awaited_domain is None:
        return Reading({}, {})
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


def topology_config(config: ModelRuntimeConfig, env: TopologyEnv, reading: Reading) -> ModelRuntimeConfig:
    """Return ``config`` with the worker's place and transfer policy; unchanged when topology is off."""
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
    """Look at the files every ``env.poll_s`` seconds, and hand each change to ``on_change``; until cancelled.

    ``config`` is what was published last. A value that vanished is handed over as vanished, with a warning:
    where the worker is then counts as unknown, and a required transfer policy fails closed.
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
            continue  # discovery is out of reach; what is still to be told is tried at the next look
        config = changed


def topology_check(environ: Mapping[str, str]) -> CheckReport:
    """Say what a worker with this environment would publish now, or why it would not start."""
    try:
        env = parse_topology_env(environ)
        if not env.enabled:
            return _report(f"Topology is off ({ENABLED} is not true): nothing is published.", env.warnings)
        reading = read_domains(env.mount_path)
        seen = env.warnings + reading.warnings + _levels_without_value(env, reading)
        if env.awaited_domain not in reading.domains:
            wait = f"a worker waits {env.timeout_s:g} s for it, then exits with code 1"
            return _refusal(f"{_missing(env, reading)}; {wait}", seen)
        config = topology_config(ModelRuntimeConfig(), env, reading)
        warnings = seen + tuple(validate_runtime_config(config))
    except ConfigError as error:
        return _refusal(error.message, ())
    published = msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
    taints = "\n".join(f"  {taint}" for taint in sorted(worker_taints(config)))
    return _report(f"A worker would publish:\n{published}\nand carry the taints:\n{taints}", warnings, config)


def _levels_without_value(env: TopologyEnv, reading: Reading) -> tuple[str, ...]:
    """A level that is misspelt counts for nothing where distances are told, and nobody would notice."""
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


def _missing(env: TopologyEnv, reading: Reading) -> str:
    return (
        f"{env.awaited_by}={env.awaited_domain}: {env.mount_path}/{env.awaited_domain} has no value "
        f"(found {reading.describe()})"
    )
