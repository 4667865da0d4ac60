"""Checks of the router itself, and of others of the same fleet."""

from collections.abc import Iterator

from kvrouter.api.fleet_schema import Fleet
from kvrouter.cli.doctor.findings import (
    Check,
    Compared,
    NotMade,
    Outcome,
    Problem,
    Severity,
    severity_of_strangers,
)
from kvrouter.cli.doctor.reading import OtherRouter, Reading, counted, first_of


def router(reading: Reading) -> Iterator[Outcome]:
    """A router that cannot see its fleet, leaves, or refuses peers."""
    fleet = reading.fleet
    yield Compared("its discovery, refused peers and connections")
    if not fleet.discovery.reachable:
        yield Problem(
            Severity.CRITICAL,
            "discovery",
            f"it cannot be reached: {fleet.discovery.why}",
            "the fleet is frozen as it was: workers that join get nothing, those that leave are still "
            "counted on",
            "bring it back: nats-server, the API server or the directory; docs/when-things-die.md",
        )
    if fleet.draining:
        yield Problem(
            Severity.WARNING,
            reading.url,
            "this router drains",
            "it takes no new requests, and exits once the running ones have ended",
            "ask another frontend; where it should not leave, look at who sent SIGTERM",
        )
    refused = reading.counts.by("kvrouter_planes_refused_total", "plane")
    if refused:
        listed = ", ".join(f"{plane} {n:g}" for plane, n in refused.items())
        yield Problem(
            severity_of_strangers(sum(refused.values())),
            reading.url,
            f"peers were refused or cut off {reading.period}: {listed}",
            "another process of the fleet has another token or version, or something else connects to its "
            "ports",
            "the event plane_refused in the log has the address; give all processes the same token and "
            "version",
        )
    refused_connections = reading.counts.total("kvrouter_http_events_total", event="connection_refused")
    if refused_connections:
        yield Problem(
            severity_of_strangers(refused_connections),
            reading.url,
            f"{counted(refused_connections, 'connection')} refused {reading.period}: too many are open",
            "clients get 503 too_many_connections",
            "raise --connections-max and the limit of open files, or add frontends",
        )


def accepting(reading: Reading) -> Iterator[Outcome]:
    """Routers that tell load balancers to send requests elsewhere. Draining, and discovery that cannot be
    reached, are another check's.
    """
    asked = [each for each in reading.accepting if each.is_asked]
    yield Compared(f"{counted(len(asked), 'router')} asked")
    for each in reading.accepting:
        if not each.is_asked:
            yield NotMade(each.url, each.why_not or "it did not answer")
    fleets = {reading.url: reading.fleet, **{other.url: other.fleet for other in reading.others}}
    for each in asked:
        fleet = fleets.get(each.url)
        is_named = fleet is not None and (fleet.draining or not fleet.discovery.reachable)
        if each.why_not is not None and not is_named:
            yield Problem(
                Severity.WARNING,
                each.url,
                f"GET /accepting says that it takes no requests: {each.why_not}",
                "load balancers and Kubernetes send it none, so that the other routers carry its share",
                "a router that has just started accepts once it knows its workers; where it stays so, start "
                "as many workers as --router-min-initial-workers asks for, or look at discovery",
            )


def replicas(reading: Reading) -> Iterator[Outcome]:
    """Routers of one fleet that do not see each other, or that differ."""
    fleet = reading.fleet
    known = [other for other in reading.others if other.fleet is not None]
    seen = 0 if fleet.replicas is None else fleet.replicas.others
    yield Compared(
        f"{counted(len(known) + 1, 'router')}; the first sees {counted(seen, 'other')} by replica sync"
    )
    if fleet.replicas is not None and fleet.replicas.behind:
        yield Problem(
            Severity.WARNING,
            reading.url,
            f"it misses bookings of {counted(fleet.replicas.behind, 'other router')}",
            "it takes workers for freer than they are",
            "look at the NATS server between routers and at plane_disturbed in the log; "
            "docs/several-hosts.md",
        )
    for other in reading.others:
        if other.fleet is None:
            yield NotMade(other.url, other.why or "it did not answer")
    if not reading.others:
        yield NotMade(
            reading.url,
            "whether other routers of the fleet see the same is seen only from their answers: --replica URL",
        )
        return
    yield from _see_each_other(reading, known)
    for other in known:
        if other.fleet is not None:
            yield from _differ(reading, other.url, fleet, other.fleet)


def _see_each_other(reading: Reading, known: list[OtherRouter]) -> Iterator[Outcome]:
    n_others = len(reading.others)
    for url, fleet in ((reading.url, reading.fleet), *((other.url, other.fleet) for other in known)):
        if fleet is None:
            continue
        if fleet.replicas is None:
            yield Problem(
                Severity.WARNING,
                url,
                f"it shares nothing with {counted(n_others, 'other router')}",
                "each router knows its own requests alone, and workers get more than they should",
                "start every router with --router-replica-sync (DYN_ROUTER_REPLICA_SYNC=true) and a NATS "
                "server",
            )
        elif fleet.replicas.others < n_others:
            yield Problem(
                Severity.WARNING,
                url,
                f"it sees {fleet.replicas.others} of {counted(n_others, 'other router')}",
                "it does not count what the others run as load",
                "give all of them the same NATS server, namespace and token; plane_lost in the log says more",
            )


def _differ(reading: Reading, url: str, fleet: Fleet, other: Fleet) -> Iterator[Outcome]:
    here, there = ({worker.worker_id for worker in each.workers} for each in (fleet, other))
    for lacks, ids in ((url, here - there), (reading.url, there - here)):
        if ids:
            yield Problem(
                Severity.WARNING,
                lacks,
                f"it does not know the workers {first_of(sorted(ids))}, which the other router knows",
                "it sends them nothing, so that the fleet's load is uneven",
                "give both the same discovery and namespace; discovery_lost and worker_refused in its log "
                "say more",
            )
    settings = {
        model.model: (model.router_mode, model.router_cost, model.block_size) for model in fleet.models
    }
    its = {model.model: (model.router_mode, model.router_cost, model.block_size) for model in other.models}
    for name in sorted(settings.keys() & its.keys()):
        if settings[name] != its[name]:
            yield Problem(
                Severity.WARNING,
                url,
                f"it routes {name} otherwise than {reading.url}: {_settings_text(its[name])}, not "
                f"{_settings_text(settings[name])}",
                "the same prompt goes to different workers by the router that gets it",
                "start all routers of a fleet with the same settings",
            )


def _settings_text(settings: tuple[str, str, int]) -> str:
    mode, cost, block_size = settings
    return f"mode {mode}, cost {cost}, blocks of {block_size}"


def recording(reading: Reading) -> Iterator[Outcome]:
    """A recording that was asked for and has ended."""
    dropped = reading.counts.by("kvrouter_recording_dropped_total", "reason")
    listed = ", ".join(f"{reason} {n:g}" for reason, n in dropped.items())
    yield Compared("no recording" if reading.fleet.recording is None else "1 recording")
    if reading.fleet.recording == "ended":
        yield Problem(
            Severity.WARNING,
            reading.url,
            "the recording that it was started with (--record) has ended",
            f"traffic is not recorded any more{f' (dropped: {listed})' if listed else ''}",
            "make room on its disk, or mend the folder, and restart the router; recording_ended in its log "
            "has "
            "the reason",
        )
    elif dropped:
        yield Problem(
            Severity.NOTE,
            reading.url,
            f"records of traffic were dropped {reading.period}: {listed}",
            "the recording has gaps",
            "a faster disk, or fewer requests a router",
        )


CHECKS = (
    Check("router", "the router sees its fleet and takes requests", router),
    Check("accepting", "every router takes requests from load balancers", accepting),
    Check("replicas", "routers of the fleet see each other and the same workers", replicas),
    Check("recording", "nothing that was to be recorded is lost", recording),
)
