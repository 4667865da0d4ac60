"""Checks of the router's knowledge of caches: KV events, feeds, and how far they hold."""

from collections.abc import Iterator

from kvrouter.api.fleet_schema import Feed, Model, Predictions, Rank, Worker
from kvrouter.cli.doctor.findings import (
    CacheShares,
    Check,
    Compared,
    NotEnough,
    NotMade,
    Outcome,
    Problem,
    Severity,
    severity_of_strangers,
)
from kvrouter.cli.doctor.reading import ANSWERS_COMPARED, Reading, counted, first_of

RECOVERY_S = 5.0
"""A feed that has been recovering for less is at work."""

PROMPT_BLOCKS = 8
"""A worker that has prefilled this many blocks of prompts holds some, unless it caches nothing,"""

LONG_BLOCKS = 2
"""or the prompts are shorter than a block: they must have this many in the mean."""

WRONG_SHARE = 0.2
"""No more than this share of compared answers may contradict the index."""

ANSWERS_SPAN_S = 5.0
"""Answers of a shorter time say nothing: no index predicts the first burst of a new prompt."""

TOKENS_PREDICTED = 2_000
"""So many predicted tokens say something,"""

SHORT = 0.7
"""and engines should have had at least this share of them cached."""

REPORTED_SHARE = 0.9
"""Where a smaller share of a route's answers says what was cached, the others may be those without a hit."""

SAY_CACHED = (
    "say how many tokens were cached: vLLM does with --enable-prompt-tokens-details, SGLang with "
    "--enable-cache-report"
)

SAY_HITS = (
    "say how many tokens were cached, and the others may be those without a hit: older SGLang, and vLLM 0.22 "
    "and older, leave out a count of 0"
)

EVENTS_REMEDY = (
    "start its engine with KV events (vLLM and SGLang: --kv-events-config, docs/events.md) and its worker "
    "without --no-kv-events; or run the whole fleet without: --no-kv-events on routers too"
)

SKIPPED = {
    "orphan": "its worker began to listen late, or lost events: restart it, and give the engine's "
    "--kv-events-config a replay_endpoint",
    "missed": "events were lost for good between the engine and its worker: give --kv-events-config a "
    "replay_endpoint and larger buffer_steps",
    "over_limit": "it reports more blocks than a rank may have: raise --router-rank-blocks-max, or look for "
    "an engine that never removes",
    "other_block_size": "the engine's blocks have another size than its card says: restart its worker",
    "tokens_mismatch": "events hold other numbers of tokens than blocks: is the engine's version supported?",
    "unnamed_lora": "adapters are numbered and not named in its events: update the engine",
    "no_tokens": "its events have no token ids: update the engine, or switch its offloading of KV off",
    "unreadable": "its messages cannot be read: are the engine's version and topic right?",
}
"""The remedy for each reason by which blocks are not passed on; the other reasons need none."""


def events_off(reading: Reading) -> Iterator[Outcome]:
    """Workers that publish no KV events while the router relies on them."""
    needed = {model.model for model in reading.fleet.models if model.indexes_events}
    heard = [worker for worker in reading.fleet.workers if worker.model in needed]
    publish = sum(worker.event_lane is not None for worker in heard)
    if heard or not reading.fleet.workers:
        yield Compared(
            f"{publish} of {counted(len(heard), 'worker')} publish KV events, which the router indexes"
        )
    else:
        yield Compared(
            f"{reading.workers_compared}: the router needs no KV events (--no-kv-events, or its mode)"
        )
    for model in reading.fleet.models:
        if model.cache_view is None:
            yield NotMade(
                f"model {model.model}", "this router is too old to say whether it follows KV events"
            )
        if not model.indexes_events:
            continue
        for worker in reading.fleet.workers_of(model):
            if worker.event_lane is None:
                yield _is_off(reading, worker)
            else:
                yield from _never_published(reading, model, worker)


def _is_off(reading: Reading, worker: Worker) -> Problem:
    engine = reading.engine_of(worker)
    warning = "" if engine is None or not engine.warnings else f"; {first_of(engine.warnings)}"
    return Problem(
        Severity.WARNING if worker.prefills else Severity.NOTE,
        str(worker),
        f"it publishes no KV events{warning}",
        "the router predicts what it has cached from its own decisions: it sees no eviction, and no prompt "
        "that came another way",
        EVENTS_REMEDY,
    )


def _never_published(reading: Reading, model: Model, worker: Worker) -> Iterator[Outcome]:
    if not worker.prefills or any(rank.index_blocks for rank in worker.ranks):
        return
    if any(rank.feed is None or rank.feed.state != "live" for rank in worker.ranks):
        return  # another check's
    worker_id = str(worker.worker_id)
    tokens = reading.gauges.total("kvrouter_worker_prompt_tokens_total", worker=worker_id)
    prompts = sum(
        reading.gauges.total("kvrouter_worker_requests_total", worker=worker_id, leg=leg)
        for leg in ("prefill", "aggregated")
    )
    fill_blocks = tokens >= LONG_BLOCKS * model.block_size * prompts
    if tokens < PROMPT_BLOCKS * model.block_size or not fill_blocks:
        yield NotEnough(
            str(worker),
            f"it has prefilled {counted(tokens, 'token')} of {counted(prompts, 'prompt')}, and reported no "
            f"block: {PROMPT_BLOCKS} blocks of {model.block_size} tokens tell, two a prompt in the mean",
        )
    else:
        yield Problem(
            Severity.WARNING,
            str(worker),
            f"it has prefilled {tokens:,.0f} tokens, and no block that it holds was ever reported",
            "either its engine caches nothing, or its events are empty: no prompt comes back to it",
            "start its engine with its prefix cache (not --no-enable-prefix-caching, not "
            "--disable-radix-cache) and with KV events; docs/events.md",
        )


def feeds(reading: Reading) -> Iterator[Outcome]:
    """Event streams that are silent, incomplete or full of losses."""
    streams = sum(rank.feed is not None for worker in reading.fleet.workers for rank in worker.ranks)
    yield Compared(f"{counted(streams, 'event stream')} of {reading.workers_compared}")
    for worker in reading.fleet.workers:
        for rank in worker.ranks:
            if rank.feed is not None:
                yield from _feed(f"{worker}, rank {rank.dp_rank}", rank, rank.feed)
    counts = reading.counts
    dropped = counts.by("kvrouter_events_dropped_total", "reason")
    if dropped:
        yield Problem(
            severity_of_strangers(sum(dropped.values())),
            "the event plane",
            f"messages were dropped as they came {reading.period}: {_listed(dropped)}",
            "a sender is broken, has another token, or speaks for workers that are not its own",
            "look at events_foreign and plane_refused in the log; give all processes the same token",
        )
    lost = {
        outcome: n
        for outcome, n in counts.by("kvrouter_feed_events_total", "outcome").items()
        if outcome in ("gaps", "history_lost", "inbox_full", "answers_overdue", "orphans")
    }
    if lost:
        yield Problem(
            Severity.NOTE,
            "event streams",
            f"{reading.period}: {_listed(lost)}",
            "what was lost was asked for again; until it came, those ranks scored nothing",
            "nothing while feeds are live; where it goes on, look at the network and at the load of this "
            "router",
        )


def _feed(subject: str, rank: Rank, feed: Feed) -> Iterator[Outcome]:
    if feed.kv_events_missing:
        yield Problem(
            Severity.WARNING,
            subject,
            f"nothing was heard of it for {feed.silent_s:.0f} s, heartbeats included",
            "the router does not see what it caches",
            "open the ports of the event plane from its host to this router, or bring NATS back; a token "
            "that "
            "differs shows as plane_refused",
        )
    if feed.state == "recovering":
        yield Problem(
            Severity.WARNING if feed.stale_s >= RECOVERY_S else Severity.NOTE,
            subject,
            f"its events are incomplete since {feed.stale_s:.1f} s, and what is missing was asked for",
            "its cache scores nothing until then",
            "if it stays so, look at recovery_failed in the router's log and at the worker's log: the worker "
            "does not answer questions about its events; restart it",
        )
    if feed.state == "partial":
        yield Problem(
            Severity.WARNING,
            subject,
            "some of its events are lost for good",
            "it holds more than the router knows, so that it gets fewer of the prompts that it has",
            "give its engine's --kv-events-config a replay_endpoint; restart the worker to begin again",
        )
    if feed.state == "over_limit":
        yield Problem(
            Severity.WARNING,
            subject,
            "it reported more blocks than it can hold",
            "nothing that it says counts for a minute, then it is asked for all of it",
            "look for an engine that never publishes removals, or two engines that publish as one worker",
        )
    skipped = {reason: n for reason, n in (rank.kv_events_skipped or {}).items() if n and reason in SKIPPED}
    if skipped:
        yield Problem(
            Severity.WARNING,
            subject,
            f"its worker could not pass on some of its KV events: {_listed(skipped)}",
            "the router does not see these blocks",
            "; ".join(SKIPPED[reason] for reason in skipped),
        )


def predictions(reading: Reading) -> Iterator[Outcome]:
    """Engines with own counts of cached tokens that contradict the index."""
    found = {share.model: share for share in shares(reading)}
    compared: list[tuple[str, Predictions]] = []
    few: list[str] = []
    never: dict[str, list[str]] = {}
    for model in reading.fleet.models:
        for worker in reading.fleet.workers_of(model):
            for rank in worker.ranks if worker.prefills else ():
                subject = f"{worker}, rank {rank.dp_rank}"
                why = _never_compared(model, worker, rank, found.get(model.model))
                if rank.predictions is not None and _is_enough(rank.predictions):
                    compared.append((subject, rank.predictions))
                elif why is not None:
                    never.setdefault(why, []).append(subject)
                else:
                    few.append(subject)
    answers = sum(last.answers for _, last in compared)
    n_ranks = len(compared) + len(few) + sum(map(len, never.values()))
    yield Compared(f"the last {counted(answers, 'answer')} of {len(compared)} of {counted(n_ranks, 'rank')}")
    for share in found.values():
        if _may_be_hits_alone(share):
            never.setdefault(f"{share.reported_by_route} {SAY_HITS}", []).append(f"model {share.model}")
    for why, subjects in never.items():
        yield NotMade(first_of(subjects, 3), why)
    if few:
        yield NotEnough(
            first_of(few, 3),
            f"fewer than {ANSWERS_COMPARED} answers with blocks that were predicted or cached, or all of "
            f"them in {ANSWERS_SPAN_S:g} s: no index predicts the first burst of a new prompt",
        )
    for subject, last in compared:
        if last.wrong_share > WRONG_SHARE:
            fewer = last.mean_error_blocks > 0
            yield Problem(
                Severity.WARNING,
                subject,
                f"{last.wrong} of its last {last.answers} answers contradict the index, by "
                f"{abs(last.mean_error_blocks):.3g} blocks {'less' if fewer else 'more'} cached in the mean",
                "requests go to the wrong worker: later first tokens",
                "its engine drops blocks without an event, or events are lost: update the engine, look at "
                "its "
                "event lag and at kv_events_skipped"
                if fewer
                else "its events come late or are not passed on: look at kv_events_skipped and its event lag",
            )


def _never_compared(model: Model, worker: Worker, rank: Rank, share: CacheShares | None) -> str | None:
    """Return why no traffic will make the router compare the answers of a rank; None if it will."""
    if model.cache_view not in (None, "events"):
        return "the router indexes no KV events of its model (--no-kv-events, or its mode)"
    if worker.event_lane is None:
        return "without its KV events none of its answers is compared"
    if rank.feed is not None and rank.feed.state == "partial":
        return "some of its events are lost for good: its answers are not compared"
    if share is not None and not share.reported_answers:
        return f"{share.reported_by_route} {SAY_CACHED}"
    return None


def _is_enough(last: Predictions) -> bool:
    spans = last.span_s is None or last.span_s >= ANSWERS_SPAN_S
    return spans and last.answers >= ANSWERS_COMPARED


def shares(reading: Reading) -> list[CacheShares]:
    """Return the predicted and the actual share of cached tokens in each model's prompts."""
    found = []
    for model in reading.fleet.models:
        prompt, predicted, cached = (
            round(reading.counts.total(f"kvrouter_{kind}_tokens_total", model=model.model))
            for kind in ("prompt", "overlap", "cached")
        )
        if prompt:
            found.append(_shares(reading, model.model, prompt, predicted, cached))
    return found


def _shares(reading: Reading, model: str, prompt: int, predicted: int, cached: int) -> CacheShares:
    name = "kvrouter_cache_reports_total"
    counts = reading.counts
    by_route = {
        route: (round(counts.total(name, model=model, route=route, reported="yes")), round(answers))
        for route, answers in counts.by(name, "route", model=model).items()
    }
    answers = sum(all_ for _, all_ in by_route.values())
    reported = sum(known for known, _ in by_route.values())
    reported_tokens = round(counts.total("kvrouter_cache_reported_prompt_tokens_total", model=model))
    if not by_route:  # an older router counts them by how much was cached alone
        name = "kvrouter_time_to_first_token_by_cache_hit_seconds_count"
        answers = round(counts.total(name, model=model))
        reported = answers - round(counts.total(name, model=model, cache_hit="unknown"))
        reported_tokens = prompt
    return CacheShares(
        model=model,
        prompt_tokens=prompt,
        predicted_tokens=predicted,
        cached_tokens=cached,
        engines_say=reported > 0,
        reported_prompt_tokens=reported_tokens,
        answers=answers,
        reported_answers=reported,
        by_route=by_route,
    )


def hit_rate(reading: Reading) -> Iterator[Outcome]:
    """Fleets with far fewer cached tokens in engines than predicted."""
    found = shares(reading)
    said = "; ".join(f"{share.reported_by_route} of {share.model} say what was cached" for share in found)
    yield Compared(f"{said or 'no answer'}, {reading.period}")
    by_model = {share.model: share for share in found}
    for model in reading.fleet.models:
        share = by_model.get(model.model)
        if model.cache_view == "none":
            yield NotMade(
                f"model {model.model}",
                f"the router predicts no cached tokens: its mode is {model.router_mode}, or overlap weighs 0",
            )
        elif share is None:
            yield NotEnough(f"model {model.model}", f"no answer {reading.period}")
        else:
            yield from _hit_rate(reading, share)


def _hit_rate(reading: Reading, share: CacheShares) -> Iterator[Outcome]:
    subject = f"model {share.model}"
    if not share.reported_answers:
        yield NotMade(subject, f"{share.reported_by_route} {SAY_CACHED}")
    elif share.predicted_tokens < TOKENS_PREDICTED:
        yield NotEnough(
            subject,
            f"{counted(share.predicted_tokens, 'token')} were predicted to be cached, of "
            f"{share.reported_by_route}: {TOKENS_PREDICTED:,} tell",
        )
    elif share.cached_tokens < SHORT * share.predicted_tokens:
        yield Problem(
            Severity.WARNING,
            subject,
            f"{share.predicted_tokens:,} tokens were predicted to be cached {reading.period}, and "
            f"engines had {share.cached_tokens:,} of them, by {share.reported_by_route}",
            "prompts are sent where their blocks are gone, or were never kept",
            "look at the findings on feeds and predictions; caches that are too small for the traffic "
            "lose blocks between decision and prefill: kvrouter hit-rate says what a larger one would "
            "bring",
        )
    elif _may_be_hits_alone(share):
        yield NotMade(subject, f"{share.reported_by_route} {SAY_HITS}")


def _may_be_hits_alone(share: CacheShares) -> bool:
    return any(0 < n < REPORTED_SHARE * all_ for n, all_ in share.by_route.values())


def _listed(counts: dict[str, float] | dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,.0f}" for name, n in counts.items())


CHECKS = (
    Check("kv-events", "every worker that prefills reports what it caches", events_off),
    Check("feeds", "every event stream is complete and heard", feeds),
    Check("predictions", "engines have cached what the router expects", predictions),
    Check("hit-rate", "engines find as much in their caches as was predicted", hit_rate),
)
