"""Checks of workers: whether they are routed to, and whether enough of them take requests."""

from collections.abc import Iterator

from kvrouter.api.fleet_schema import ExpectedState, Model, Worker
from kvrouter.cli.doctor.findings import Check, Compared, NotMade, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import Reading, counted, first_of
from kvrouter.core.errors import Reason
from kvrouter.core.workers import Role

NO_CAPACITY_WHY = (
    "without its number of KV blocks a worker counts as endless: no busy threshold holds there, and its load "
    "is compared by requests alone"
)


def refused(reading: Reading) -> Iterator[Outcome]:
    """Workers that are announced and never get a request. Other block sizes are another check's."""
    if reading.fleet.refused_workers is None:
        yield NotMade("refused workers", "this router is too old to list them")
        return
    n_announced = len(reading.fleet.workers) + len(reading.fleet.refused_workers)
    yield Compared(f"{counted(n_announced, 'announced worker')}")
    for worker in reading.fleet.refused_workers:
        if worker.field != "block_size":
            yield Problem(
                Severity.CRITICAL,
                str(worker),
                f"it is announced for {worker.model!r}, and the router refuses it: {worker.why}",
                "it gets no request, and its engine is idle",
                f"correct {worker.field or 'what the message names'} in what starts it, and restart it; the "
                "router's log has the event worker_refused",
            )


def expected_engines(reading: Reading) -> Iterator[Outcome]:
    """Engines that were named and have no worker, or whose address is wrong."""
    engines = reading.fleet.expected_engines
    if engines is None:
        yield NotMade(reading.url, "this router is too old to list the engines that it waits for")
        return
    joined = sum(engine.state == ExpectedState.JOINED for engine in engines)
    yield Compared(f"{joined} of {counted(len(engines), 'expected engine')} joined")
    for engine in engines:
        if not engine.has_problem:
            continue
        where = f" ({engine.written_at})" if engine.written_at else ""
        severity, seen, why, remedy = _EXPECTED.get(engine.state, _EXPECTED[ExpectedState.AWAITED])
        yield Problem(
            severity,
            f"{engine.engine_url or 'the engine'}{where}",
            f"{seen}: {engine.reason or 'no reason is known'}",
            why,
            remedy,
        )


_EXPECTED: dict[str, tuple[Severity, str, str, str]] = {
    ExpectedState.AWAITED: (
        Severity.WARNING,
        "it has no worker yet",
        "it gets no requests",
        "start the engine, or correct its URL; it joins by itself once it answers",
    ),
    ExpectedState.REFUSED: (
        Severity.CRITICAL,
        "it answers, and is refused",
        "it gets no requests, and is idle",
        "correct what the reason names, in the fleet file or in what starts the engine",
    ),
    ExpectedState.JOINED: (
        Severity.WARNING,
        "it has a worker, and its URL is wrong",
        "nobody can say which of them gets a request: its KV events do not count, and their loads mix",
        "name each engine by its own address (its pod or host), and not by that of a service before several",
    ),
}
"""Of each state of an engine with a problem: how bad it is, what was seen, why it matters, and the remedy."""


def answering(reading: Reading) -> Iterator[Outcome]:
    """Workers that do not answer, have a silent engine, leave, or are cordoned."""
    yield Compared(reading.workers_compared)
    for worker in reading.fleet.workers:
        if not worker.alive:
            yield Problem(
                Severity.CRITICAL,
                str(worker),
                f"it is announced and does not answer on the request plane ({worker.address})",
                "it gets no requests until it answers",
                "look at its process and its log, and at the network from the router to that address; "
                "restart it",
            )
        elif worker.lapsed:
            yield Problem(
                Severity.WARNING,
                str(worker),
                "its lease at discovery ran out; it is kept because it answers",
                "other routers that start now do not find it, and it is lost here once its connection is",
                "look at its connection to discovery: its log has plane_disturbed or plane_lost",
            )
        if worker.engine_silent:
            yield Problem(
                Severity.CRITICAL,
                str(worker),
                "its engine does not answer it, or came back as another one",
                "it takes no new requests until the engine answers as before",
                "restart the engine; its worker's log says under engine_silent what is wrong",
            )
        if worker.draining:
            yield Problem(
                Severity.NOTE,
                str(worker),
                "it drains: it ends its running requests and takes no new ones",
                "its capacity is missing; after a rolling restart it leaves by itself",
                "if nobody stops it, look at who sent SIGTERM, or took its pod or engine out of service",
            )
        for cordon in worker.cordons:
            by = cordon.by or "an annotation of the node"
            why = f": {cordon.reason}" if cordon.reason else ""
            yield Problem(
                Severity.NOTE,
                str(worker),
                f"{cordon.level} {cordon.name} is cordoned by {by}{why}",
                "it takes no new requests until the cordon is taken back",
                f"kvrouter uncordon {cordon.level} {cordon.name}, or take the annotation back, once that is "
                "over",
            )


def circuits(reading: Reading) -> Iterator[Outcome]:
    """Workers, and pairs of workers, that are passed over because requests failed there."""
    failures = reading.counts.total("kvrouter_worker_failures_total")
    yield Compared(f"{reading.workers_compared}, {counted(failures, 'failed leg')} {reading.period}")
    for worker in reading.fleet.workers:
        if worker.circuit != "closed":
            yield Problem(
                Severity.WARNING,
                str(worker),
                f"its circuit is {worker.circuit}: requests failed there again and again",
                "it is passed over as long as another worker may take a request",
                "look at kvrouter_worker_failures_total by reason, at its log and its engine's, and at the "
                "network in between; the circuit closes by itself once a request succeeds",
            )
    for model in reading.fleet.models:
        for pair in model.parted_pairs:
            if pair.reason == Reason.CANNOT_TRANSFER:
                continue  # among the formats
            yield Problem(
                Severity.WARNING,
                f"workers {pair.prefill_worker_id} and {pair.decode_worker_id} ({model.model})",
                f"KV between them was lost lately; their circuit is {pair.circuit}",
                "both are paired with others where that is possible, and such prompts were computed twice",
                "mend the network between the two hosts (ports of the KV connector, NetworkPolicy, RDMA), or "
                "restart the end that all losses have in common",
            )


def capacity(reading: Reading) -> Iterator[Outcome]:
    """Workers without a known number of KV blocks, and contexts that differ."""
    n_ranks = sum(len(worker.ranks) for worker in reading.fleet.workers)
    yield Compared(f"{counted(n_ranks, 'rank')} of {reading.workers_compared}")
    for worker in reading.fleet.workers:
        if any(rank.total_blocks is None for rank in worker.ranks):
            yield Problem(
                Severity.WARNING,
                str(worker),
                "neither its card nor a load report says how many KV blocks it has",
                NO_CAPACITY_WHY,
                "set runtime_config.total_kv_blocks where it registers, or let its engine report its load: "
                "vLLM does so without --disable-log-stats, TensorRT-LLM with enable_iter_perf_stats: true",
            )
    for model in reading.fleet.models:
        yield from _contexts(model, reading.fleet.workers_of(model))


def _contexts(model: Model, workers: list[Worker]) -> Iterator[Outcome]:
    lengths: dict[int, list[int]] = {}
    for worker in workers:
        if worker.context_length is not None:
            lengths.setdefault(worker.context_length, []).append(worker.worker_id)
    if len(lengths) > 1:
        longest = max(lengths)
        shorter = "; ".join(
            f"{length} tokens at {first_of(ids)}"
            for length, ids in sorted(lengths.items())
            if length < longest
        )
        yield Problem(
            Severity.WARNING,
            f"model {model.model}",
            f"contexts differ: {longest} tokens at some workers, {shorter}",
            "a longer prompt is refused by those with a shorter context, and all of them go to the others",
            "start the engines of one model with the same --max-model-len (--context-length of SGLang)",
        )


def roles(reading: Reading) -> Iterator[Outcome]:
    """Models with requests that no worker takes, or a leg that no worker takes; a router without models."""
    n_able = sum(worker.takes_requests for worker in reading.fleet.workers)
    n_models = counted(len(reading.fleet.models), "model")
    yield Compared(f"{n_able} of {reading.workers_compared} of {n_models} take requests")
    if not reading.fleet.models and not reading.fleet.refused_workers:
        yield Problem(
            Severity.CRITICAL,
            reading.url,
            "it knows no worker of any model",
            "every request is answered 404 or 503",
            "start workers; those that run must have this router's discovery, namespace (--namespace) and "
            "token",
        )
    for model in reading.fleet.models:
        workers = reading.fleet.workers_of(model)
        able = [worker for worker in workers if worker.takes_requests]
        if not able:
            yield Problem(
                Severity.CRITICAL,
                f"model {model.model}",
                f"of {counted(len(workers), 'worker')} none takes requests",
                "every request for it is answered 503 no_eligible_worker",
                "bring workers of the model back: the other findings say why each of them takes none",
            )
        elif not any(worker.decodes for worker in able):
            yield Problem(
                Severity.CRITICAL,
                f"model {model.model}",
                f"{counted(len(able), 'prefill worker')} may take requests, and no worker decodes",
                "no request can be answered: 503 no_eligible_worker, role decode",
                "start decode workers (role: decode, or both), or look at why those that are there take none",
            )
        elif not any(worker.prefills for worker in able):
            were = [worker for worker in workers if worker.role == Role.PREFILL]
            yield Problem(
                Severity.CRITICAL if were else Severity.WARNING,
                f"model {model.model}",
                f"{counted(len(able), 'decode worker')} may take requests, and no worker of another role",
                "decode workers prefill each prompt for themselves, where their engines can, and answers "
                "that "
                "run there wait meanwhile",
                "start prefill workers, or let these have the role both",
            )
    yield from _not_served(reading)


def _not_served(reading: Reading) -> Iterator[Outcome]:
    for model in reading.fleet.models:
        if reading.fleet.workers_of(model) and model.model not in reading.served:
            yield Problem(
                Severity.CRITICAL,
                f"model {model.model}",
                "it has workers, and the router has no tokenizer for it",
                "every request for it is answered 503 model_not_ready",
                "give the router the model's tokenizer (tokenizer in the fleet file, or --tokenizer); the "
                "event tokenizer_failed in its log says what is wrong with the one that it tried",
            )


CHECKS = (
    Check("refused-workers", "every worker that is announced can be routed to", refused),
    Check("expected-engines", "every engine that was named has a worker", expected_engines),
    Check("answering", "every worker and its engine answer", answering),
    Check("circuits", "no worker and no pair is passed over", circuits),
    Check("capacity", "every worker says what it can hold", capacity),
    Check("roles", "every model has workers for both legs, and a tokenizer", roles),
)
