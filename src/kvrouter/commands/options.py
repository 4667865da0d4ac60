"""What commands were given, as their command lines have it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrouter.commands.output import TABLE, Output
from kvrouter.config.option import option
from kvrouter.engines.registry import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """How a timing is fitted: to the first ``n_seen`` requests of a run, or of those sent to ``url``.

    ``folder`` has files of a run that say what a live engine does not.
    """

    url: str | None = option(
        "Measure the live engine at http://HOST:PORT instead of reading RUN.", metavar="URL"
    )
    n_seen: int = option(
        "Fit to the first N requests and predict the others; 0 fits nothing. With --url: send N, 10 to "
        "1000, and a third as many to predict.",
        default=30,
        flag="--requests",
        metavar="N",
        at_least=0,
    )
    write_timing: Path | None = option("Write the timing there, in YAML.", metavar="FILE")
    model_config: Path | None = option(
        "The model's config.json from Hugging Face; needed where the model's name is not known.",
        metavar="FILE",
    )
    model: str | None = option("With --url: the model, where the engine serves several.", metavar="NAME")
    folder: Path | None = option(
        "With --url: a folder with files of a RUN that say what the engine does not: meta.json, "
        "config.json, model.json.",
        flag="--engine",
        metavar="FOLDER",
    )
    request_limit_s: float = option(
        "With --url: give up when one request takes longer.",
        default=120.0,
        metavar="S",
        above=0,
        at_most=86_400,
    )
    output: Output = TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PastOptions:
    """What every command takes that reads a recording as the past, and replays nothing."""

    recording: Path
    model: str | None = option("The model; may be left out where one is recorded.", metavar="NAME")
    output: Output = TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateOptions(PastOptions):
    """The workers whose hits are looked at."""

    fleet: Path | None = option(
        "The recorded workers with the KV blocks of this fleet file.  [default: as their cards say]",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunOptions(PastOptions):
    """The policy under which requests are decided again; ``wait_s`` are seconds."""

    domain: str = option(
        "The domain that KV transfers would have kept to, as the workers' labels call it: zone.",
        is_required=True,
        flag="--kv-transfer-domain",
        metavar="LEVEL",
    )
    enforcement: Literal["required", "fallback"] = option(
        "How strictly. What is preferred refuses nobody.",
        default="required",
        flag="--kv-transfer-enforcement",
    )
    wait_s: float = option(
        "How long a request would have waited for a decode worker to join its domain.",
        default=0.0,
        flag="--router-domain-wait",
        metavar="SECONDS",
    )
    fail_if_refused: bool = option("Exit with 1 where a request would have been refused.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Which router is asked."""

    url: str = option(
        "The running router.  [KVROUTER_URL; default: http://127.0.0.1:8000]",
        default="http://127.0.0.1:8000",
        variable="KVROUTER_URL",
        hides_default=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(RouterOptions):
    """What of a fleet is examined, and for how long. ``over_s``: counts are taken over this time; None for
    all since the router began. An engine may take ``timeout_s`` for each answer.
    """

    replicas: tuple[str, ...] = option(
        "Another router of the same fleet, to be compared with it; may be given more than once.",
        default=(),
        flag="--replica",
        metavar="URL",
    )
    over_s: float | None = option(
        "Count what happens in this time, and not all since the router began.",
        metavar="SECONDS",
        above=0,
        at_most=3600,
    )
    engines: bool = option(
        "Ask engines too: what they are, what time they have, how they tokenize.  [default: engines]",
        default=True,
        hides_default=True,
    )
    timeout_s: float = option(
        "How long the router, or an engine, may take for an answer.",
        default=10.0,
        metavar="SECONDS",
        above=0,
        at_most=600,
    )
    recording: Path | None = option(
        "A recording of its traffic: show where cache hits were lost too, as kvrouter hit-rate does.",
        metavar="RECORDING",
    )
    model: str | None = option("Whose hits; may be left out where one is recorded.", metavar="NAME")
    output: Output = TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTemplate:
    """What a new fleet file is to have: mock engines, or the engines at ``urls``, each as
    ``http://HOST:PORT``, ``ROLE=http://HOST:PORT`` or ``ROLE@ZONE=http://HOST:PORT``; with ``zones``, which
    KV does not leave.
    """

    engine: str = option(
        "What serves the requests: mock engines, or servers that run already.",
        default="mock",
        choices=("mock", *ENGINES),
    )
    model: str | None = option("The model; required with other engines than mock.", metavar="NAME")
    urls: tuple[str, ...] = option(
        "An engine's server, as http://10.0.1.1:8000, or prefill@a=http://10.0.1.1:8000 for one that "
        "prefills in zone a. Give it once for each engine.",
        default=(),
        flag="--url",
        metavar="[ROLE[@ZONE]=]URL",
    )
    zones: tuple[str, ...] = option(
        "A zone with one prefill and two decode workers, with mock engines; KV stays in its zone. Give it "
        "once for each zone. Without any, four workers do both.",
        default=(),
        flag="--zone",
        metavar="NAME",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """What a standalone router has in addition to a router's settings, and whose requests it decides: all of
    a request, or the leg of one kind of worker.
    """

    component: Literal["all", "prefill", "backend"] = option(
        "prefill: the prefill leg alone, each prefill worker a target of its own. backend: workers that "
        "decode, or serve whole requests. all: whole requests, pairs where prefill workers are.",
        default="all",
    )
    lease_ttl_s: float = option(
        "A booking of which nobody says anything for this long ends. Every call about it renews it.",
        default=300.0,
        metavar="SECONDS",
        above=0,
    )
    bookings_max: int = option(
        "How many requests may be booked at a time; then 503.", default=65_536, metavar="INT", at_least=1
    )
    prefills_max: int = option(
        "How many prefill legs may run at a time; then 503. With --component prefill.",
        default=4096,
        metavar="INT",
        at_least=1,
    )
