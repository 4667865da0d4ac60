"""The options of ``kvrouter worker mock`` and of the commands for engines: the worker of a fleet file, or the
values of one as flags.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from kvrouter.settings.option import option, option_of

DRAIN_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MockFileOptions:
    """The worker's place in a fleet file."""

    fleet: Path | None = option("Take the worker from a fleet file.", metavar="FILE")
    group: str | None = option("The group of the fleet file; with --fleet.", metavar="NAME")
    index: int = option("Which worker of the group, from 0; with --fleet.", default=0)
    worker_id: int | None = option("Its id in the fleet.  [default: random]", metavar="INT")


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModelOptions:
    """The model that it serves."""

    model: str | None = option(
        "The model that it serves.  [default: mock]", metavar="NAME", path=("models", 0, "name")
    )
    tokenizer: str | None = option(
        "The model's tokenizer.  [default: mock]",
        metavar="FOLDER|REPOSITORY",
        path=("models", 0, "tokenizer"),
    )
    role: str | None = option(
        "Which legs it serves.  [default: both]", metavar="prefill|decode|both", path=("workers", 0, "role")
    )
    block_size: int | None = option(
        "Tokens in a KV block.  [default: 64]", metavar="INT", path=("models", 0, "block_size")
    )
    context_length: int | None = option(
        "Prompt and answer.  [default: 32768 tokens]", metavar="INT", path=("models", 0, "context_length")
    )
    dp_size: int | None = option(
        "Data-parallel ranks.  [default: 1]", metavar="INT", path=("workers", 0, "dp_size")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """Where it is, which prompts it takes, and which domain its KV stays in."""

    domain: tuple[str, ...] = option(
        "Where it is, the broadest level first: --domain zone=a --domain rack=r7.",
        default=(),
        metavar="LEVEL=VALUE",
        path=("workers", 0, "domains"),
    )
    taint: tuple[str, ...] = option(
        "A taint of its own; may be repeated.", default=(), metavar="TEXT", path=("workers", 0, "taints")
    )
    prompt_tokens_min: int | None = option(
        "The shortest prompt that it prefills.", metavar="INT", path=("workers", 0, "prompt_tokens", "min")
    )
    prompt_tokens_max: int | None = option(
        "The longest prompt that it prefills.", metavar="INT", path=("workers", 0, "prompt_tokens", "max")
    )
    kv_transfer_domain: str | None = option(
        "The domain that its KV transfers keep to.", metavar="LEVEL", path=("kv_transfer", "domain")
    )
    kv_transfer_enforcement: str | None = option(
        "How strictly.  [default: required]",
        metavar="required|preferred|fallback",
        path=("kv_transfer", "enforcement"),
    )
    kv_transfer_preferred_weight: float | None = option(
        "From 0 to 1.", metavar="NUMBER", path=("kv_transfer", "preferred_weight")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MockEngineOptions:
    """The properties of its engine."""

    total_kv_blocks: int | None = option(
        "KV blocks of a rank.  [default: 16384]",
        metavar="INT",
        path=("workers", 0, "engine", "total_kv_blocks"),
    )
    max_num_seqs: int | None = option(
        "Sequences in a batch.  [default: 256]", metavar="INT", path=("workers", 0, "engine", "max_num_seqs")
    )
    max_num_batched_tokens: int | None = option(
        "Tokens in a step.  [default: 8192]",
        metavar="INT",
        path=("workers", 0, "engine", "max_num_batched_tokens"),
    )
    handoff: str | None = option(
        "How KV is handed on.  [default: bootstrap]",
        metavar="bootstrap|synchronous",
        path=("workers", 0, "engine", "handoff"),
    )
    kv_load_failure_policy: str | None = option(
        "What to do without KV.",
        metavar="fail|recompute",
        path=("workers", 0, "engine", "kv_load_failure_policy"),
    )
    kv_events: bool | None = option(
        "Publish KV events.  [default: yes]", path=("workers", 0, "engine", "kv_events")
    )
    speedup: float | None = option(
        "Times faster than life.  [default: 1]", metavar="NUMBER", path=("speedup",)
    )
    seed: int | None = option("What its tokens are drawn from.  [default: 0]", metavar="INT", path=("seed",))


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
class EnginePods:
    """The pods that are served: those with the label of an engine, narrowed by ``selector``.

    ``namespace`` is this process's own if it is None.
    """

    selector: str = option(
        "Only pods with these labels too, as team=a,tier!=test.", default="", metavar="LABELS"
    )
    namespace: str | None = option(
        "Another namespace than this pod's own.", flag="--engine-namespace", metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsRunOptions:
    """How the process of the workers of pods serves."""

    drain_limit_s: float = option("Time for running legs at the end.", default=DRAIN_LIMIT_S)


FILE_PATHS = {
    each.name: option_of(each).path
    for group in (MockModelOptions, PlaceOptions, MockEngineOptions)
    for each in fields(group)
}
"""The path in a fleet file of the value of each flag; the flag is ``--`` and the name with dashes."""
