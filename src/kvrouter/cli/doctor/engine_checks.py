"""Checks that compare workers' values with those of their engines: sizes, versions, clocks, tokens."""

from collections.abc import Iterable, Iterator, Sequence

from kvrouter.api.fleet_schema import Model, Worker
from kvrouter.cli.doctor.findings import Check, NotMade, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import EngineReading, Reading, TokenProbe, first_of

CLOCK_APART_S = 2.0
"""Clocks with a smaller difference are equal: an engine states its time in whole seconds."""

CLOCK_REMEDY = "set the host's clock: does chrony, ntpd or systemd-timesyncd run there, and reach a server?"
CLOCK_WHY = (
    "log lines, traces and event lags of the two hosts cannot be compared, and leases and certificates end "
    "early or late"
)

ANSWERS_COMPARED = 8
"""So many compared answers say something,"""

OTHER_PROMPT_SHARE = 0.1
BLIND_SHARE = 0.5
"""and if more than this share had another number of tokens, the router's tokens are not the engine's."""

TOKENIZER_WHY = (
    "the router hashes other tokens than the engine caches: it finds no prompt again, and routes by load"
)


def engines(reading: Reading) -> Iterator[Outcome]:
    """Engines that could not be asked: other checks rely on their workers' values."""
    if not reading.engines_asked:
        yield NotMade("engines", "--no-engines: no engine was asked")
    for engine in reading.engines.values():
        if engine.why is not None:
            yield NotMade(f"the engine of worker {engine.worker_id}", engine.why)


def block_sizes(reading: Reading) -> Iterator[Outcome]:
    """Workers of one model, or a worker and its engine, with different block sizes."""
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
    unknown: list[int] = []
    for worker in reading.fleet.workers:
        known = [
            rank.feed.clock_ahead_s
            for rank in worker.ranks
            if rank.feed is not None and rank.feed.clock_ahead_s is not None
        ]
        if not known:
            unknown.append(worker.worker_id)
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
    with_clock = {engine.worker_id for engine in reading.engines.values() if engine.clock_ahead_s is not None}
    silent = [worker_id for worker_id in unknown if worker_id not in with_clock]
    if silent:
        yield NotMade(
            f"worker {silent[0]}" if len(silent) == 1 else f"workers {first_of(silent)}",
            "neither KV events with a time nor an engine that says the time was heard of",
        )


def _apart(ahead_s: float) -> str:
    return f"its clock is {abs(ahead_s):.3g} s {'ahead of' if ahead_s > 0 else 'behind'} the router's"


def tokenizers(reading: Reading) -> Iterator[Outcome]:
    """Engines that make other tokens of a text than the router does."""
    for model in reading.fleet.models:
        if model.routing_reason is not None:
            yield Problem(
                Severity.WARNING,
                f"model {model.model}",
                f"its calls are routed by load alone: {model.routing_reason}",
                "what its workers have cached counts for nothing, and no answer goes on elsewhere when its "
                "engine is lost",
                "name the engine's own tokenizer: its folder or its hub name (tokenizer in the fleet file, "
                "--model-path, or --tokenizer of its worker); or let engines that have /tokenize do it "
                "(--tokenize-fallback engine)",
            )
            continue
        if model.tokenized_by == "engine":
            yield Problem(
                Severity.NOTE,
                f"model {model.model}",
                "its prompts, or its chats, are tokenized by its engines",
                "each such call waits for an engine's /tokenize, by --tokenize-engine-wait-s at most",
                "name the engine's own tokenizer to have them tokenized here",
            )
            continue
        workers = [worker for worker in reading.fleet.workers_of(model) if worker.takes_calls]
        if workers and not reading.engines_asked:
            yield NotMade(f"model {model.model}", "--no-engines: no engine was asked")
        yield from _differing(
            model, workers, [probe for probe in reading.probes if probe.model == model.model]
        )
        yield from _other_prompts(reading, model)
        yield from _blind_shapes(reading, model)
        yield from _unrendered_chats(model)


def _differing(model: Model, workers: Iterable[Worker], probes: Sequence[TokenProbe]) -> Iterator[Outcome]:
    by_id = {worker.worker_id: worker for worker in workers}
    for probe in probes:
        worker = by_id.get(probe.worker_id) if probe.worker_id is not None else None
        what = "a chat" if probe.is_chat else "a text"
        if probe.router is None or probe.engine is None:
            subject = f"model {model.model}" if worker is None else f"the engine of worker {worker.worker_id}"
            yield NotMade(subject, f"{what} was not tokenized there: {probe.why}")
        elif tuple(probe.router) != tuple(probe.engine):
            remedy = (
                "give the router the engine's own tokenizer: the folder or the hub name that it was started "
            )
            remedy += "with (tokenizer in the fleet file, --model-path, or --tokenizer of its worker)"
            if probe.is_chat:
                remedy += ", and the same chat template"
            yield Problem(
                Severity.CRITICAL,
                f"model {model.model}" if worker is None else str(worker),
                f"of {what} its engine makes {len(probe.engine)} tokens ({_first_ids(probe.engine)}), the "
                "router "
                f"{len(probe.router)} ({_first_ids(probe.router)})",
                TOKENIZER_WHY,
                remedy,
            )


def _other_prompts(reading: Reading, model: Model) -> Iterator[Outcome]:
    name = "kvrouter_index_predictions_total"
    workers = reading.counts.by(name, "worker", model=model.model, prediction="other_prompt")
    for worker_id, other in workers.items():
        compared = reading.counts.total(name, model=model.model, worker=worker_id)
        if compared >= ANSWERS_COMPARED and other > OTHER_PROMPT_SHARE * compared:
            yield Problem(
                Severity.WARNING,
                f"worker {worker_id} ({model.model})",
                f"of {other:g} of {compared:g} calls its engine made another number of tokens than the "
                "router, "
                f"{reading.period}",
                TOKENIZER_WHY,
                "give the router the engine's tokenizer and chat template (tokenizer in the fleet file, or "
                "--model-path)",
            )


def _blind_shapes(reading: Reading, model: Model) -> Iterator[Outcome]:
    name = "kvrouter_prompt_shape_answers_total"
    for shape, missed in reading.counts.by(name, "shape", model=model.model, prediction="missed").items():
        answers = reading.counts.total(name, model=model.model, shape=shape)
        if answers >= ANSWERS_COMPARED and missed > BLIND_SHARE * answers:
            yield Problem(
                Severity.WARNING,
                f"calls of the shape {shape!r} ({model.model})",
                f"{missed:g} of {answers:g} were not found where their engine had them cached, "
                f"{reading.period}",
                "the engine makes another prompt of such calls than the router, which routes them by load",
                "look for flags of the engine that change prompts (--chat-template, "
                "--chat-template-content-format, defaults of template names), and give the router the "
                "engine's own template; or let engines tokenize such calls (--tokenize-fallback engine); "
                "report the shape where none of that helps",
            )


def _unrendered_chats(model: Model) -> Iterator[Outcome]:
    for unrendered in model.unrendered_chats:
        if unrendered.chats < ANSWERS_COMPARED:
            continue
        yield Problem(
            Severity.WARNING,
            f"model {model.model}",
            f"{unrendered.chats} chats could not be made into prompts ({unrendered.reason}): "
            f"{unrendered.detail}",
            "such chats are routed by load: what its workers have cached of them counts for nothing",
            "give the router the engine's own chat template (chat_template.jinja in the folder of its "
            "tokenizer); report the template where it is that already",
        )


def _first_ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:6])) + (" …" if len(ids) > 6 else "")


def _asked(reading: Reading) -> Iterator[tuple[Worker, EngineReading]]:
    for worker in reading.fleet.workers:
        engine = reading.engine_of(worker)
        if engine is not None:
            yield worker, engine


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
    Check("tokenizers", "engines make the same tokens as the router", tokenizers),
)
