"""Checks that compare workers' values with those of their engines: sizes, versions, clocks."""

from collections.abc import Iterator

from kvrouter.api.fleet_schema import Worker
from kvrouter.cli.doctor.findings import Check, Compared, NotEnough, NotMade, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import EngineReading, Reading, counted, first_of

CLOCK_APART_S = 2.0
"""Clocks with a smaller difference are equal: an engine states its time in whole seconds."""

CLOCK_REMEDY = "set the host's clock: does chrony, ntpd or systemd-timesyncd run there, and reach a server?"
CLOCK_WHY = (
    "log lines, traces and event lags of the two hosts cannot be compared, and leases and certificates end "
    "early or late"
)


def engines(reading: Reading) -> Iterator[Outcome]:
    """Engines that could not be asked: other checks rely on their workers' values."""
    n_answered = sum(engine.why is None for engine in reading.engines.values())
    yield Compared(f"{n_answered} of {counted(len(reading.engines), 'engine')} with an address answered")
    if not reading.engines_asked:
        yield NotMade("engines", "--no-engines: no engine was asked")
    for engine in reading.engines.values():
        if engine.why is not None:
            yield NotMade(f"the engine of worker {engine.worker_id}", engine.why)


def block_sizes(reading: Reading) -> Iterator[Outcome]:
    """Workers of one model, or a worker and its engine, with different block sizes."""
    yield Compared(_cards_and_engines(reading))
    for refused in reading.fleet.refused_workers or ():
        if refused.field == "block_size":
            yield Problem(
                Severity.CRITICAL,
                str(refused),
                f"it is announced for {refused.model!r} and the router refuses it: {refused.why}",
                "it gets no request: blocks of two sizes cannot be compared",
                "start all engines of the model with the same --block-size (vLLM) or --page-size (SGLang), "
                "and "
                "the same block_size of workers",
            )
    for worker, engine in _asked(reading):
        if engine.block_size is not None and worker.block_size not in (None, engine.block_size):
            yield Problem(
                Severity.CRITICAL,
                str(worker),
                f"its card says blocks of {worker.block_size} tokens, and its engine has blocks of "
                f"{engine.block_size}",
                "none of its blocks is found again",
                "restart its worker, so that it attaches to the engine as it is now",
            )
    yield from _unasked(reading)


def versions(reading: Reading) -> Iterator[Outcome]:
    """Parts of the fleet that run different versions."""
    own: dict[str, list[str]] = {}
    n_routers = 1 + sum(other.fleet is not None for other in reading.others)
    yield Compared(f"{counted(n_routers, 'router')}, {_cards_and_engines(reading)}")
    for worker in reading.fleet.workers:
        if worker.version is not None:
            own.setdefault(worker.version, []).append(f"worker {worker.worker_id}")
    routers = [(reading.url, reading.fleet.version)]
    routers += [(other.url, other.fleet.version) for other in reading.others if other.fleet is not None]
    for url, version in routers:
        if version is None:
            yield NotMade(url, "this router is too old to say its version and its workers'")
        else:
            own.setdefault(version, []).insert(0, f"router {url}")
    if len(own) > 1:
        yield Problem(
            Severity.WARNING,
            "kvrouter",
            _parts(own),
            "what one version sends the other may refuse or misread; fixes of the newer one are missing",
            "finish the update: the same version everywhere, frontends and workers together (docs/wire.md)",
        )
    for model in reading.fleet.models:
        kinds: dict[str, dict[str, list[str]]] = {}
        for worker in reading.fleet.workers_of(model):
            kind, _, version = (worker.engine or "").partition(" ")
            if version:
                kinds.setdefault(kind, {}).setdefault(version, []).append(f"worker {worker.worker_id}")
        for kind, found in sorted(kinds.items()):
            if len(found) > 1:
                yield Problem(
                    Severity.WARNING,
                    f"{kind} ({model.model})",
                    _parts(found),
                    "KV that one version sends another may not read, and their block hashes, templates and "
                    "speeds may differ",
                    "run one version of the engine for a model; where an update is on its way, finish it",
                )
    for worker, engine in _asked(reading):
        if engine.version is not None and worker.engine not in (None, engine.version):
            yield Problem(
                Severity.WARNING,
                str(worker),
                f"its card says {worker.engine}, and its engine is {engine.version} now",
                "what the worker knows of the engine is that of its former start",
                "restart the worker",
            )
    yield from _unasked(reading)


def clocks(reading: Reading) -> Iterator[Outcome]:
    """Hosts with a clock far from the router's."""
    unknown: list[Worker] = []
    for worker in reading.fleet.workers:
        known = [
            rank.feed.clock_ahead_s
            for rank in worker.ranks
            if rank.feed is not None and rank.feed.clock_ahead_s is not None
        ]
        if not known:
            unknown.append(worker)
            continue
        ahead_s = max(known)
        if abs(ahead_s) > CLOCK_APART_S:
            yield Problem(Severity.WARNING, str(worker), _apart(ahead_s), CLOCK_WHY, CLOCK_REMEDY)
    for engine in reading.engines.values():
        if engine.clock_ahead_s is not None and abs(engine.clock_ahead_s) > CLOCK_APART_S:
            yield Problem(
                Severity.WARNING,
                f"the engine of worker {engine.worker_id}",
                _apart(engine.clock_ahead_s),
                CLOCK_WHY,
                CLOCK_REMEDY,
            )
    n_clocks = len(reading.fleet.workers) - len(unknown)
    n_engines = sum(engine.clock_ahead_s is not None for engine in reading.engines.values())
    yield Compared(f"the clocks of {counted(n_clocks, 'worker')} and {counted(n_engines, 'engine')}")
    with_clock = {engine.worker_id for engine in reading.engines.values() if engine.clock_ahead_s is not None}
    silent = [worker for worker in unknown if worker.worker_id not in with_clock]
    followed = [each.worker_id for each in silent if any(rank.feed is not None for rank in each.ranks)]
    timeless = [each.worker_id for each in silent if each.worker_id not in followed]
    if followed:
        yield NotEnough(f"workers {first_of(followed)}", "no KV event with a time was heard of yet")
    if timeless:
        yield NotMade(
            f"workers {first_of(timeless)}",
            "no KV events of theirs are followed, and no engine said its time",
        )


def _apart(ahead_s: float) -> str:
    return f"its clock is {abs(ahead_s):.3g} s {'ahead of' if ahead_s > 0 else 'behind'} the router's"


def _asked(reading: Reading) -> Iterator[tuple[Worker, EngineReading]]:
    for worker in reading.fleet.workers:
        engine = reading.engine_of(worker)
        if engine is not None:
            yield worker, engine


def _cards_and_engines(reading: Reading) -> str:
    n_engines = sum(_says_what_it_is(engine) for _, engine in _asked(reading))
    return f"the cards of {reading.workers_compared}, {counted(n_engines, 'engine')} asked"


def _says_what_it_is(engine: EngineReading | None) -> bool:
    return engine is not None and engine.version is not None


def _unasked(reading: Reading) -> Iterator[NotMade]:
    """Yield the engines known only from their workers' cards."""
    unasked = [
        worker.worker_id
        for worker in reading.fleet.workers
        if worker.takes_calls and not _says_what_it_is(reading.engine_of(worker))
    ]
    if unasked:
        yield NotMade(
            f"the engines of workers {first_of(unasked)}",
            "they were not asked, or did not answer: what their workers' cards say was compared alone",
        )


def _parts(found: dict[str, list[str]]) -> str:
    most = sorted(found.items(), key=lambda each: -len(each[1]))
    return "; ".join(f"{version}: {first_of(parts)}" for version, parts in most)


CHECKS = (
    Check("engines", "every engine that has an address answers", engines),
    Check("block-sizes", "blocks of one model have one size", block_sizes),
    Check("versions", "one version runs everywhere", versions),
    Check("clocks", "the clocks of all hosts agree", clocks),
)
