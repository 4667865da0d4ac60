"""Checks of load: requests that wait or were refused, and why."""

from collections.abc import Iterator, Mapping

from kvrouter.api.fleet_schema import Model, Rank
from kvrouter.cli.doctor.findings import Check, Compared, NotEnough, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import Reading, counted, first_of

REFUSED_SHARE = 0.01
"""Fewer refusals among all requests are noted, and are no warning."""

CLIENTS_OWN = frozenset(
    (
        "invalid_request",
        "body_over_bounds",
        "context_length_exceeded",
        "unknown_worker",
        "unauthorized",
        "model_not_found",
        "decision_not_found",
        "not_found",
        "method_not_allowed",
        "request_too_large",
        "route_not_served",
        "unsupported_encoding",
        "unsupported_media_type",
        "request_in_use",
        "request_not_booked",
        "prefill_not_found",
        "prefill_discarded",
        "nobody_left",
        "cordoned_elsewhere",
        "not_ready",
    )
)
"""Errors that are the calls' own fault, and answers to probes of a frontend that starts."""

REASONS = {
    "wrong_role": "workers of the role that a request needs are missing",
    "pinned_elsewhere": "requests are pinned to workers (nvext, routing headers): are their ids still right?",
    "taint_missing": "requests require taints or adapters that no worker carries",
    "domain_mismatch": "no decode worker is left in the domain of the prefill worker: see zones",
    "domain_unknown": "workers do not publish the domain that the transfer policy names: see labels",
    "cannot_transfer": "no decode worker can take the KV of prefill workers: see formats",
    "excluded": "workers failed the same request before: see circuits and answering",
    "busy": "all workers are above their busy thresholds: add workers, or raise the thresholds",
    "not_alive": "workers do not answer on the request plane: see answering",
    "draining": "workers leave: see answering",
    "cordoned": "workers are cordoned: see answering, and kvrouter cordon",
    "engine_silent": "engines do not answer their workers: see answering",
    "context_too_short": "requests do not fit the contexts of workers: see capacity",
    "prompt_out_of_range": "prompts are of lengths that no pool takes (prompt_tokens)",
    "far_from_frontend": "no worker that prefills is near the frontend: see zones",
    "circuit_open": "workers failed again and again: see circuits",
    "kv_lost": "KV between pairs was lost lately: see circuits and transfers",
    "too_late": "first tokens would come later than --slo-ttft-ms: add workers, or raise it",
}
"""The remedy for each reason of a refusal."""

CODES = {
    "no_eligible_worker": "no worker passes the constraints",
    "all_workers_busy": "every worker is above its busy threshold, or the queue is full: add workers, raise "
    "--admission-queue-max, --admission-wait-s and the thresholds",
    "model_not_ready": "the model's workers or its tokenizer are not here yet: see roles",
    "worker_failed": "workers failed and no safe try was left: see answering and circuits",
    "deadline_exceeded": "no token came in time (--request-timeout-s, --ttft-timeout-s): see slow-ranks "
    "and the engines' queues",
    "encode_pool_full": "prompts waited too long to be tokenized: raise --tokenize-max-bytes, add frontends",
    "prompt_over_budget": "prompts are longer than --tokenize-max-bytes allows: raise it",
    "uploads_full": "bodies hold more than --uploads-max-bytes: raise it, add frontends",
    "retry_bodies_full": "bodies hold more than --retry-bodies-max-bytes: raise it, add frontends",
    "too_many_connections": "raise --connections-max and the limit of open files, or add frontends",
}
"""The remedy for each error."""


def queue(reading: Reading) -> Iterator[Outcome]:
    """Requests that wait, and workers that are all busy."""
    waiting = sum(model.waiting_requests for model in reading.fleet.models)
    yield Compared(f"{counted(waiting, 'waiting request')} of {counted(len(reading.fleet.models), 'model')}")
    for model in reading.fleet.models:
        refused = reading.counts.by("kvrouter_queue_refusals_total", "cause", model=model.model)
        if refused:
            causes = ", ".join(f"{cause} {n:g}" for cause, n in refused.items())
            yield Problem(
                _severity(reading, sum(refused.values()), model.model),
                f"model {model.model}",
                f"the queue refused requests {reading.period}: {causes}",
                "clients get 503 all_workers_busy",
                "add workers; --admission-queue-max and --admission-wait-s only say how many wait, and for "
                "how "
                "long",
            )
        if model.waiting_requests:
            yield Problem(
                Severity.NOTE,
                f"model {model.model}",
                f"{counted(model.waiting_requests, 'request')} in line for a worker that is not busy",
                "their first tokens come later by that time",
                "add workers where requests wait all the time",
            )
        able = [worker for worker in reading.fleet.workers_of(model) if worker.takes_requests]
        legs = {
            "prefill": [worker for worker in able if worker.prefills],
            "decode": [worker for worker in able if worker.decodes],
        }
        if legs["prefill"] == legs["decode"]:
            legs = {"take requests": able}
        busy = [
            f"{counted(len(workers), 'worker')} may {leg}"
            for leg, workers in legs.items()
            if workers and all(_is_busy(model, rank) for worker in workers for rank in worker.ranks)
        ]
        if busy:
            yield Problem(
                Severity.WARNING,
                f"model {model.model}",
                f"{' and '.join(busy)}, and each is above its busy threshold",
                "further requests wait or get 503 all_workers_busy",
                "add workers, or raise the thresholds (POST /busy_threshold) if engines have room",
            )


def _is_busy(model: Model, rank: Rank) -> bool:
    blocks, tokens = model.active_decode_blocks_threshold, model.active_prefill_tokens_threshold
    report = rank.report
    active = rank.active_blocks if report is None else max(rank.active_blocks, report.active_blocks)
    waiting = rank.prefill_tokens if report is None else report.active_prefill_tokens or rank.prefill_tokens
    over_blocks = (
        blocks is not None and bool(rank.total_blocks) and active > blocks * (rank.total_blocks or 0)
    )
    return over_blocks or (tokens is not None and waiting > tokens)


def refusals(reading: Reading) -> Iterator[Outcome]:
    """Requests that were answered with an error that is not their own fault."""
    counts = reading.counts
    models = counts.by("kvrouter_errors_total", "model")
    requests = counts.total("kvrouter_requests_total")
    yield Compared(f"{counted(requests, 'request')} {reading.period}")
    if not requests:
        yield NotEnough("requests", f"none {reading.period}")
    for model in models:
        codes = {
            code: n
            for code, n in counts.by("kvrouter_errors_total", "code", model=model).items()
            if code not in CLIENTS_OWN
        }
        if not codes:
            continue
        n_refused = sum(codes.values())
        requests = counts.total("kvrouter_requests_total", model=model)
        listed = ", ".join(f"{code} {n:g}" for code, n in codes.items())
        yield Problem(
            _severity(reading, n_refused, model),
            f"model {model}",
            f"{n_refused:g} of {requests:g} requests were answered with an error {reading.period}: {listed}",
            "clients see 503, 502 or 504, and try again where they can",
            _remedy(codes, counts.by("kvrouter_refusals_total", "reason")),
        )


def _remedy(codes: Mapping[str, float], reasons: Mapping[str, float]) -> str:
    parts = [f"{code}: {CODES[code]}" for code in codes if code in CODES]
    if "no_eligible_worker" in codes or "all_workers_busy" in codes:
        parts += [
            f"{reason} ({n:g} ranks): {REASONS[reason]}" for reason, n in reasons.items() if reason in REASONS
        ]
    return "; ".join(parts) or f"kvrouter explain shows a decision; the log has {first_of(codes)}"


def _severity(reading: Reading, n_refused: float, model: str) -> Severity:
    requests = reading.counts.total("kvrouter_requests_total", model=model)
    return Severity.WARNING if n_refused >= REFUSED_SHARE * requests else Severity.NOTE


CHECKS = (
    Check("queue", "requests need not wait for workers", queue),
    Check("refusals", "no request is refused for what is not its own fault", refusals),
)
