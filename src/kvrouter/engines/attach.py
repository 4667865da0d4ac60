"""Attaches a running engine: the spec, the result, and the protocol that each kind of engine implements."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.workers import FORMAT_UNKNOWN, KvFormat, ModelRuntimeConfig, Role
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.port import Engine
from kvrouter.transports.requests.port import WorkerUnreachable

PORTS = 2**16

_NOWHERE = ("tcp://", "tcp://*")
"""Addresses that an engine may bind, and no client can connect to."""

_REACHED = ("tcp://", "ipc://")
"""Addresses that another process can connect to."""


class KeyRefused(WorkerUnreachable):
    """The engine asks for a key, or for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSpec:
    """The engine to attach, its worker, and the settings that no engine reports.

    A field that is None is asked of the engine. ``kv_events`` and ``kv_events_replay`` are the endpoints of
    rank 0; each further rank has the next ports. ``wait_s`` is how long its first answer may take: loading a
    model takes minutes. ``runtime_config`` has the worker's domains, taints and transfer policy.
    """

    kind: str
    url: str
    worker_id: WorkerId
    wait_s: float = math.inf
    role: Role = Role.BOTH
    model: str | None = None
    tokenizer: str | None = None
    block_size: int | None = None
    context_length: int | None = None
    dp_size: int | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    publishes_kv_events: bool = True
    api_key: str | None = field(default=None, repr=False)
    runtime_config: ModelRuntimeConfig = field(default_factory=ModelRuntimeConfig)
    component: str | None = None
    """The component of its worker; None for that of its role."""
    enable_local_indexer: bool = False
    is_standby: bool = False
    pod: str = ""
    """The Kubernetes pod that the engine runs in; empty if unknown."""
    node: str = ""
    """That pod's node, or the host; empty if unknown."""
    start: str = ""
    """Differs from one start of the engine to the next, where its operator knows which one this is."""
    key_at: str = ""
    """Where its key is read, or would be: a variable, or a field that names one or a file."""
    written_at: str = ""
    """Where all this is written, as ``workers[0].engine.url``; empty for flags."""
    fields_at: Mapping[str, str] = field(default_factory=dict)
    """Where that is written, or may be, which an engine may contradict: by the name of the field."""

    @property
    def place(self) -> str:
        """Where the engine is written, and its URL."""
        return f"{self.written_at} ({self.url})" if self.written_at else self.url

    def is_contradicted_by(self, error: KvrouterError) -> bool:
        """Whether an engine was refused for a field that is set here: not for an unreadable page, nor for a
        value that the engine does not report just now.
        """
        name = error.param or ""
        return isinstance(error, ConfigError) and name != "url" and getattr(self, name, None) is not None

    def mistake(self, must: str, *, param: str | None) -> ConfigError:
        """Return an error that names where the field is written, and what the engine contradicts.

        ``param`` is the name of the field; None for the engine itself.
        """
        place = self.fields_at.get(param or "")
        places = [f"{self.written_at}: {self.url}"] if self.written_at else []
        places += [] if place in (None, self.written_at) else [place]
        return ConfigError(": ".join((*places, must)), param=self.written_at or param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An attached engine: its adapter, and the fields of its worker's card.

    ``tokenizer`` is the folder, or the name on a hub, from which the engine loaded its own.
    ``total_kv_blocks`` is None if it did not report how many blocks a rank has.
    """

    engine: Engine
    version: str
    model: str
    tokenizer: str
    context_length: int | None
    block_size: int | None
    total_kv_blocks: int | None
    dp_size: int
    publishes_kv_events: bool
    warnings: tuple[str, ...]
    dp_start: int = 0
    bootstrap: tuple[str, int] | None = None
    """Host and port of the bootstrap server for prefill handoffs."""
    decode_only: bool = False
    """Whether it takes no prompt without its KV."""
    ends_after_transfer: bool = False
    """Whether its prefill leg ends when its KV was fetched, and not when it is computed."""
    kv_format: KvFormat = FORMAT_UNKNOWN
    """What another engine must have in common with it to take its KV, or to hand it any."""
    bidirectional_kv: bool = False
    """Whether KV can go from it, a decode engine, to a prefill engine, or to it from a decode engine."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Other names for calls: another name of the model (None), or an adapter of it."""
    start: str = ""
    """Distinguishes two starts of the engine; empty if it does not report one."""
    identity: Mapping[str, object] = field(default_factory=dict)
    """The reported values from which the worker's card and calls are made. A probe compares them by
    :func:`check_identity`: if they differ, another engine has taken the place of this one."""

    def is_same_as(self, other: "Attached") -> bool:
        """Whether the worker of one serves the other: what no card can change is the same."""
        return self._fixed() == other._fixed()

    def _fixed(self) -> tuple[object, ...]:
        return self.model, self.block_size, self.context_length, self.dp_start, self.dp_size, self.identity


def check_identity(url: str, now: Mapping[str, object], before: Mapping[str, object]) -> None:
    """Raise WorkerUnreachable for an engine that was restarted as another one than its worker has.

    Both are what :attr:`Attached.identity` has.
    """
    for what, was in before.items():
        if now.get(what) != was:
            raise WorkerUnreachable(f"{url} was started again with other {what}: {now.get(what)}, not {was}")


AttachEngine = Callable[[AttachSpec], Awaitable[Attached]]
"""Asks an engine for its values, and returns it with its adapter, not started.

Raises :class:`~kvrouter.transports.requests.port.WorkerUnreachable` if it does not answer, and
:class:`~kvrouter.core.errors.ConfigError` with the contradicted field of :class:`AttachSpec` as ``param``.
"""


def check_model(
    spec: AttachSpec, served: tuple[str, ...], engine_fix: str = "with --served-model-name {model}"
) -> str:
    """Return the name of the model; raise ConfigError if the engine does not serve the stated one."""
    model = spec.model or served[0]
    if model not in served:
        raise ConfigError(
            f"the engine serves {', '.join(served)}, not {model!r}: give one of these, "
            f"or start the engine {engine_fix.format(model=model)}",
            param="model",
        )
    return model


def check_block_size(spec: AttachSpec, block_size: int, engine_flag: str) -> None:
    """Raise ConfigError if the engine's block size is not the stated one."""
    if spec.block_size is not None and spec.block_size != block_size:
        raise ConfigError(
            f"the engine's blocks have {block_size} tokens, not {spec.block_size}: "
            f"leave it out, or start the engine with {engine_flag} {spec.block_size}",
            param="block_size",
        )


def block_size_of(spec: AttachSpec, block_size: int | None, engine_flag: str) -> int | None:
    """Return the tokens of a block: as the engine reports, else as stated; None if neither is known. Raises
    as :func:`check_block_size` does.
    """
    if block_size is None:
        return spec.block_size
    check_block_size(spec, block_size, engine_flag)
    return block_size


def least_known(counts: Iterable[int | None]) -> int | None:
    """Return the least of some counts; None where one of them is not known."""
    known = [*counts]
    return None if None in known else min((each for each in known if each is not None), default=None)


def context_length_of(spec: AttachSpec, context_length: int | None, engine_flag: str) -> int | None:
    """Return how many tokens the worker takes, which may be fewer than its engine does; None if unknown.

    Raises ConfigError if the engine's context is shorter than stated.
    """
    if context_length is None:
        return spec.context_length
    stated = context_length if spec.context_length is None else spec.context_length
    if stated > context_length:
        raise ConfigError(
            f"the engine's context holds {context_length} tokens, not {stated}: "
            f"say {context_length}, or less, or start the engine with {engine_flag} {stated}",
            param="context_length",
        )
    return stated


def events_of(
    spec: AttachSpec, reported: Mapping[DpRank, EventsAt], n_ranks: int
) -> tuple[Mapping[DpRank, EventsAt], tuple[str, ...]]:
    """Return where the ranks publish, as the operator or else the engine states, and warnings."""
    if not spec.publishes_kv_events:
        return {}, ()
    events = {rank: each for rank, each in reported.items() if each.events.startswith(_REACHED)}
    if spec.kv_events is not None:
        topic = next(iter(reported.values())).topic if reported else ""
        events = {
            DpRank(rank): EventsAt(
                _counted_on("kv_events", spec.kv_events, rank),
                spec.kv_events_replay and _counted_on("kv_events_replay", spec.kv_events_replay, rank),
                topic,
            )
            for rank in range(n_ranks)
        }
    if not events and reported:
        endpoint = next(iter(reported.values())).events
        return {}, (
            f"the engine at {spec.url} publishes its KV events at {endpoint}, where its own process alone "
            "hears them: give its --kv-events-config an endpoint that begins with tcp://",
        )
    if not events:
        return {}, (
            f"the engine at {spec.url} tells of no KV events: start it with --kv-events-config, name them by "
            "--kv-events (kv_events_endpoint in a fleet file), or say --no-kv-events (kv_events: false); "
            "routers predict its cache from their own decisions",
        )
    if any(each.replay is None for each in events.values()):
        return events, (
            "the engine's --kv-events-config has no replay_endpoint: KV events that are missed are lost for "
            "good, those before this worker began included",
        )
    return events, ()


def _counted_on(field_name: str, endpoint: str, rank: int) -> str:
    base, _, port = endpoint.rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) + rank < PORTS
    if not base.startswith("tcp://") or base in _NOWHERE or not is_port:
        raise ConfigError(f"must be tcp://HOST:PORT, not {endpoint!r}", param=field_name)
    return f"{base}:{int(port) + rank}"
