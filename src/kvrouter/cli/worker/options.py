"""The options of ``kvrouter worker`` that only the command line uses, beside ``fleetfile.worker_options``."""

from dataclasses import dataclass
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.settings.option import option

DRAIN_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MockFileOptions:
    """The worker's place in a fleet file."""

    fleet: Path | None = option("Take the worker from a fleet file.", metavar="FILE")
    group: str | None = option("The group of the fleet file; with --fleet.", metavar="NAME")
    index: int = option("Which worker of the group, from 0; with --fleet.", default=0)
    worker_id: int | None = option("Its id in the fleet.  [default: random]", metavar="INT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentOptions:
    """Which component of the namespace it belongs to."""

    component: str | None = option(
        "The component that it is part of: each has its own JetStream stream of KV events, and its own "
        "snapshots of the index.  [default: prefill for prefill workers, else backend]",
        metavar="NAME",
    )

    @property
    def checked(self) -> str | None:
        """The name; raises ConfigError for one that could be no part of a subject or a key."""
        from kvrouter.settings.planes import NAME_CHARS, is_plain_name  # noqa: PLC0415

        if self.component is not None and not is_plain_name(self.component):
            raise ConfigError(
                f"--component: must be up to {NAME_CHARS} letters, digits, dashes and underscores, not "
                f"{self.component!r}",
                param="component",
            )
        return self.component


@dataclass(frozen=True, slots=True, kw_only=True)
class MockRunOptions:
    """How its process serves."""

    enable_local_indexer: bool = option(
        "Answer routers that missed KV events, which then travel over NATS Core instead of JetStream.",
        default=False,
    )
    engine_events: str | None = option(
        "Where an engine of your own tells its KV events, unix:PATH or tcp://HOST:PORT; the mock answers.",
        metavar="ADDRESS",
    )
    is_static: bool = option(
        "Be announced nowhere and publish no KV events: frontends name this worker by --static-endpoint.",
        default=False,
    )
    is_standby: bool = option(
        "Begin once no other worker of this id is announced; without it the newer start takes the place.",
        default=False,
    )
    drain_limit_s: float = option("Time for running legs at the end.", default=DRAIN_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """The engine that it serves: that of a fleet file, or the one that the flags describe."""

    url: str | None = option("Its server, as http://127.0.0.1:8000.", metavar="URL")
    fleet: Path | None = option(
        "Take the worker from a fleet file, instead of --url and what goes with it.", metavar="FILE"
    )
    group: str | None = option("The group of the fleet file; with --fleet.", metavar="NAME")
    index: int = option("Which engine of the group, from 0; with --fleet.", default=0)
    model: str | None = option("Which of the names that it serves.  [default: the first]", metavar="NAME")
    tokenizer: str | None = option(
        "The model's tokenizer: a folder, for frontends on this host, or a Hugging Face repository, "
        "or engine, which has its engine tokenize.  [default: the engine's own]",
        metavar="FOLDER|REPOSITORY",
    )
    role: str | None = option("Which legs it serves.  [default: both]", metavar="prefill|decode|both")
    worker_id: int | None = option("Its id in the fleet.  [default: random]", metavar="INT")
    block_size: int | None = option("What its KV blocks must have.  [default: asked]", metavar="INT")
    context_length: int | None = option(
        "Tokens of prompt and answer together; at most the engine's own.  [default: asked]",
        metavar="INT",
        at_least=1,
    )
    kv_events: str | None = option(
        "Where rank 0 publishes its KV events, tcp://HOST:PORT.  [default: asked]", metavar="ADDRESS"
    )
    kv_events_replay: str | None = option(
        "Where rank 0 replays them; with --kv-events.  [default: asked]", metavar="ADDRESS"
    )
    no_kv_events: bool = option("Do not listen to its KV events.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRunOptions:
    """How the process of an engine's worker serves."""

    enable_local_indexer: bool = option(
        "Answer routers that missed KV events, which then travel over NATS Core, not JetStream.",
        default=False,
    )
    is_standby: bool = option("Wait until no other start of its id serves.", default=False)
    engine_wait_s: float = option(
        "How long the engine may take to answer: it loads its model first.",
        default=600.0,
        at_least=0,
        at_most=86_400,
    )
    drain_limit_s: float = option("Time for running legs at the end.", default=DRAIN_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsRunOptions:
    """How the process of the workers of pods serves."""

    drain_limit_s: float = option("Time for running legs at the end.", default=DRAIN_LIMIT_S)
