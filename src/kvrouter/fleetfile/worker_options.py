"""The options of workers that are flags and values of a fleet file, and those that select engines' pods."""

from dataclasses import dataclass, fields

from kvrouter.engines.registry import ENGINES
from kvrouter.settings.option import option, option_of


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
    """Where it is, which prompts it takes, and where its KV may go."""

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
    kv_format: tuple[str, ...] = option(
        "What a worker must have in common to take its KV, or to hand it any: --kv-format version=0.32.0; "
        "may be repeated, and wins over what the engine reports.",
        default=(),
        metavar="PART=VALUE",
        path=("workers", 0, "kv_format"),
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
class EngineUrls:
    """What serves the requests: mock engines, or the engines at ``urls``, each as ``http://HOST:PORT``,
    ``ROLE=http://HOST:PORT`` or ``ROLE@ZONE=http://HOST:PORT``.
    """

    engine: str = option(
        "What serves the requests: mock engines, or servers that run already, at --url.",
        default="mock",
        choices=("mock", *ENGINES),
    )
    urls: tuple[str, ...] = option(
        "An engine's server, as http://10.0.1.1:8000, or prefill@a=http://10.0.1.1:8000 for one that "
        "prefills in zone a. Give it once for each engine.",
        default=(),
        flag="--url",
        metavar="[ROLE[@ZONE]=]URL",
    )


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


FILE_PATHS = {
    each.name: option_of(each).path
    for group in (MockModelOptions, PlaceOptions, MockEngineOptions)
    for each in fields(group)
}
"""The path in a fleet file of the value of each flag; the flag is ``--`` and the name with dashes."""
