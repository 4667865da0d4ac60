"""What happens to a fleet during a replay: links, labels, policies, workers that are added."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.sim_fleet import SimFleet
from kvrouter.sim.replay.simulation import Result, check_room
from kvrouter.sim.replay.timetable import (
    AddEvent,
    DieEvent,
    DrainEvent,
    JoinEvent,
    LabelEvent,
    LinkEvent,
    PolicyEvent,
    TimetableEvent,
    read_timetable,
)
from kvrouter.sim.replay.timetable_plan import plan_timetable
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.replays import TWO_ZONES, by_number, fleet, replayed, row

TIMING = Timing()
PREFILL_S = TIMING.prefill_ms(192) / 1e3
KV_BYTES = 192 * 131_072
THRESHOLDS = "router: {active_decode_blocks_threshold: 0.0005, active_prefill_tokens_threshold: 500}"
PAIRS = f"kv_transfer: {{domain: zone}}{TWO_ZONES}"
"""Inside a zone a prompt of 192 tokens moves in 1.92 s; between zones it takes ten times as long, and 1 s."""

ACROSS = TWO_ZONES.replace("- {name: da, role: decode, domains: {zone: a}}\n", "").replace(
    "- {name: pb, role: prefill, domains: {zone: b}}\n", ""
)
"""One prefill worker in a, one decode worker in b."""


def same(one: Result, other: Result) -> None:
    assert by_number(one) == by_number(other)
    assert one.carried == other.carried


# Links


def test_link_that_falls_to_a_tenth_carries_the_rest_ten_times_slower() -> None:
    rows = [row(0, 0.0, [1, 2, 3])]
    file = fleet(ACROSS)
    (before,) = replayed(rows, file).outcomes
    assert before.ttft_s is not None
    decode_s = before.ttft_s - (PREFILL_S + 1.0 + 19.2)
    falls_s = PREFILL_S + 1.0 + 9.6
    falls = [LinkEvent(at_s=falls_s, between=("b", "a"), bandwidth_factor=0.1)]
    (after,) = replayed(rows, file, timetable=falls).outcomes
    assert after.ttft_s == pytest.approx(falls_s + 96.0 + decode_s)


def test_restored_link_carries_as_before_with_latency_for_later_transfers() -> None:
    rows = [row(0, 10.0, [1, 2, 3]), row(1, 300.0, [4, 5, 6])]
    events = [
        LinkEvent(at_s=1.0, between=("a", "b"), bandwidth_bytes_per_s=131_072.0, latency_factor=5.0),
        LinkEvent(at_s=290.0, between=("a", "b"), bandwidth_factor=1.0, latency_s=1.0),
    ]
    plain, changed = replayed(rows, fleet(ACROSS)), replayed(rows, fleet(ACROSS), timetable=events)
    (usual_s, slow_s), (_, later_s) = (
        [by_number(result)[number].ttft_s for result in (plain, changed)] for number in (0, 1)
    )
    assert usual_s is not None
    assert slow_s == pytest.approx(usual_s + 9 * 19.2 + 4.0)
    assert later_s == pytest.approx(usual_s)


def test_router_decisions_ignore_a_changed_link() -> None:
    weighed = "router: {kv_transfer_weight: 100.0}" + TWO_ZONES
    rows = [row(number, 20.0 * number, [number, 9, 8]) for number in range(6)]
    falls = [LinkEvent(at_s=0.0, between=(zone, zone), bandwidth_factor=0.5) for zone in "ab"]
    plain, fallen = replayed(rows, fleet(weighed)), replayed(rows, fleet(weighed), timetable=falls)
    pairs = [[(each.prefill, each.decode) for each in by_number(result)] for result in (plain, fallen)]
    assert pairs[0] == pairs[1]
    assert not any(each.crosses for each in by_number(fallen))
    assert all(
        slow.ttft_s > quick.ttft_s
        for slow, quick in zip(by_number(fallen), by_number(plain), strict=True)
        if slow.ttft_s is not None and quick.ttft_s is not None
    )


def test_link_of_one_level_changes_alone() -> None:
    text = """
topology:
  levels: [zone, rack]
  links:
    within:
      zone: {latency_s: 0.0, bandwidth_bytes_per_s: 1310720.0}
      rack: {latency_s: 0.0, bandwidth_bytes_per_s: 13107200.0}
workers:
- {name: p, role: prefill, domains: {zone: a, rack: "1"}}
- {name: d, role: decode, domains: {zone: a, rack: RACK}}
"""
    rows = [row(0, 0.0, [1, 2, 3])]
    event = LinkEvent(at_s=0.0, level="rack", between=("1", "1"), bandwidth_factor=0.5)
    other = LinkEvent(at_s=0.0, between=("a", "a"), bandwidth_factor=0.5)
    near, far = fleet(text.replace("RACK", '"1"')), fleet(text.replace("RACK", '"2"'))

    def took_s(file: FleetFile, *events: LinkEvent) -> float:
        (outcome,) = replayed(rows, file, timetable=events).outcomes
        return (outcome.ttft_s or 0.0) - PREFILL_S - TIMING.decode_ms(0.0) / 1e3

    assert took_s(near) == pytest.approx(1.92, rel=1e-2)
    assert took_s(near, event) == pytest.approx(3.84, rel=1e-2)
    assert took_s(far) == pytest.approx(19.2, rel=1e-2)
    assert took_s(far, other) == pytest.approx(38.4, rel=1e-2)
    racks = LinkEvent(at_s=0.0, level="rack", between=("1", "2"), bandwidth_factor=0.5)
    for file, wrong in ((near, other), (far, racks)):
        with pytest.raises(ConfigError, match="goes over one of level") as refused:
            plan_timetable([wrong], file)
        assert refused.value.param == "between"
    result = replayed(rows, far)
    assert {tuple(pair): each.arrived_bytes for pair, each in result.carried.items()} == {
        ("a", "a"): KV_BYTES
    }


# Labels


def test_relabelled_worker_counts_for_its_new_zone() -> None:
    rows = [row(0, 0.0, [1, 2, 3]), row(1, 30.0, [4, 5, 6]), row(2, 60.0, [7, 8, 9])]
    file = fleet(f"kv_transfer: {{domain: zone}}{ACROSS}")
    moves = [
        LabelEvent(at_s=20.0, group="da2", set={"zone": "a"}),
        LabelEvent(at_s=50.0, domains={"zone": "a"}, set={"zone": None}),
    ]
    file = fleet(f"kv_transfer: {{domain: zone}}{ACROSS}".replace("name: db", "name: da2"))
    result = replayed(rows, file, timetable=moves)
    first, second, third = by_number(result)
    assert (first.error, first.reason) == ("no_eligible_worker", "domain_mismatch")
    assert (second.error, second.crosses) == ("", False)
    assert third.error == "no_eligible_worker"
    assert {tuple(pair): each.arrived_bytes for pair, each in result.carried.items()} == {
        ("a", "a"): KV_BYTES
    }


def test_relabelled_engine_keeps_its_cache_and_running_requests() -> None:
    rows = [row(0, 0.0, [1, 2], output_tokens=400), row(1, 30.0, [1, 2])]
    text = "topology: {levels: [zone]}\nworkers: [{name: w, domains: {zone: a}}]"
    moves = [LabelEvent(at_s=1.0, group="w", set={"zone": "b"})]
    same(replayed(rows, fleet(text), timetable=moves), replayed(rows, fleet(text)))


def test_running_transfer_keeps_its_link_when_a_label_changes() -> None:
    rows = [row(0, 0.0, [1, 2, 3]), row(1, 60.0, [4, 5, 6])]
    moves = [LabelEvent(at_s=PREFILL_S + 5.0, group="db", set={"zone": "a"})]
    plain = by_number(replayed(rows, fleet(ACROSS)))
    moved = by_number(replayed(rows, fleet(ACROSS), timetable=moves))
    assert moved[0].ttft_s == plain[0].ttft_s
    assert plain[1].ttft_s is not None
    assert moved[1].ttft_s == pytest.approx(plain[1].ttft_s - 1.0 - 19.2 + 1.92)


def test_dead_worker_rejoins_in_the_zone_of_its_new_label() -> None:
    rows = [row(0, 10.0, [1, 2, 3])]
    events = [
        DieEvent(at_s=1.0, group="db"),
        LabelEvent(at_s=2.0, group="db", set={"zone": "a"}),
        JoinEvent(at_s=3.0, domains={"zone": "a"}),
    ]
    result = replayed(rows, fleet(f"kv_transfer: {{domain: zone}}{ACROSS}"), timetable=events)
    assert [outcome.error for outcome in result.outcomes] == [""]


def test_draining_worker_ends_its_request_and_keeps_its_cache_for_a_rejoin() -> None:
    rows = [row(number, 20.0 * number, [1, 2, 3], output_tokens=400) for number in range(4)]
    file = fleet("workers: [{name: w, replicas: 2}]")
    plain = by_number(replayed(rows, file))
    assert len({outcome.decode for outcome in plain}) == 1
    favourite = plain[0].decode
    assert favourite is not None
    events = [
        DrainEvent(at_s=0.5, worker=favourite),
        DrainEvent(at_s=0.6, worker=favourite),
        JoinEvent(at_s=39.0, worker=favourite),
        DieEvent(at_s=39.5, worker=3 - favourite),
    ]
    drained = by_number(replayed(rows, file, timetable=events))
    assert [outcome.error for outcome in drained] == [""] * 4
    assert [outcome.decode for outcome in drained] == [favourite, 3 - favourite, favourite, favourite]
    assert drained[0].last_s == plain[0].last_s  # it was at work when it began to drain
    assert [outcome.cached_tokens for outcome in drained] == [
        0,
        0,
        *(each.cached_tokens for each in plain[2:]),
    ]
    died = [
        DrainEvent(at_s=0.5, worker=favourite),
        DieEvent(at_s=5.0),
        JoinEvent(at_s=6.0, worker=favourite),
    ]
    fresh = by_number(replayed(rows, file, timetable=died))
    assert [(each.decode, each.error) for each in fresh[1:]] == [(favourite, "")] * 3  # it drains no more
    assert fresh[1].cached_tokens == 0


# Policies


def test_policy_that_becomes_required_refuses_crossings_it_allowed() -> None:
    text = f"kv_transfer: {{domain: zone, enforcement: fallback}}{ACROSS}"
    rows = [row(0, 0.0, [1, 2, 3]), row(1, 60.0, [4, 5, 6]), row(2, 120.0, [7, 8, 9])]
    events = [
        PolicyEvent(at_s=50.0, set={"kv_transfer.enforcement": "required"}),
        PolicyEvent(at_s=110.0, set={"kv_transfer": None}),
    ]
    outcomes = by_number(replayed(rows, fleet(text), timetable=events))
    assert [(each.error, each.crosses) for each in outcomes] == [
        ("", True),
        ("no_eligible_worker", False),
        ("", False),  # without a policy there is nothing to cross
    ]


def test_router_mode_change_takes_effect_during_a_replay() -> None:
    rows = [row(number, 20.0 * number, [1, 2, 3] if number < 4 else [5, 6, 7]) for number in range(8)]
    file = fleet("workers: [{name: w, replicas: 4}]")
    at = [PolicyEvent(at_s=70.0, set={"router_mode": "round-robin"})]
    decode = [outcome.decode for outcome in by_number(replayed(rows, file, timetable=at))]
    assert len(set(decode[:4])) == 1
    assert len(set(decode[4:])) == 4
    back = [PolicyEvent(at_s=70.0, set={"router.router_mode": "kv", "overlap_score_weight": 2})]
    by_turns = fleet("router: {router_mode: round-robin}\nworkers: [{name: w, replicas: 4}]")
    decode = [outcome.decode for outcome in by_number(replayed(rows, by_turns, timetable=back))]
    assert len(set(decode[:4])) == 4
    assert len(set(decode[4:])) == 1


def test_busy_threshold_set_during_a_replay_takes_effect() -> None:
    rows = [row(n, 30.0 + 0.001 * n, [10 * n, 10 * n + 1, 10 * n + 2], output_tokens=2) for n in range(6)]
    file = fleet("workers: [{name: w}]")
    busy = [PolicyEvent(at_s=10.0, set={"active_prefill_tokens_threshold": 64})]
    errors = {outcome.error for outcome in replayed(rows, file, timetable=busy).outcomes}
    assert "all_workers_busy" in errors
    assert {outcome.error for outcome in replayed(rows, file).outcomes} == {""}


@pytest.mark.parametrize(
    ("router", "change"),
    [
        (
            "active_prefill_tokens_threshold: 64, admission_queue_max: 8, admission_wait_s: 60",
            {"active_prefill_tokens_threshold": None},
        ),
        (
            "kv_transfer_topology_level: zone, kv_transfer_mismatch_policy: fail, router_domain_wait_s: 60",
            {"kv_transfer_mismatch_policy": "fallback"},
        ),
    ],
)
def test_waiting_requests_are_retried_when_settings_change(router: str, change: dict[str, object]) -> None:
    rows = [row(number, 0.001 * number, [10 * number, 10 * number + 1]) for number in range(4)]
    file = fleet(f"router: {{{router}}}{ACROSS}")
    change_s = 0.01
    outcomes = by_number(replayed(rows, file, timetable=[PolicyEvent(at_s=change_s, set=change)]))
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert outcomes[-1].placed_s == change_s


# Workers that are added


def test_added_workers_take_requests() -> None:
    rows = [row(0, 0.0, [1, 2, 3]), row(1, 30.0, [4, 5, 6])]
    decodes = AddEvent(at_s=20.0, group="db", replicas=2)
    file = fleet(f"kv_transfer: {{domain: zone}}{TWO_ZONES}")
    late = [DieEvent(at_s=5.0, group="db"), DieEvent(at_s=5.0, group="pa"), decodes]
    outcomes = by_number(replayed(rows, file, timetable=late))
    assert outcomes[1].decode in (5, 6)
    new = AddEvent.model_validate(
        {
            "at_s": 20.0,
            "workers": [{"name": "new", "role": "decode", "domains": {"zone": "b"}, "replicas": 2}],
        }
    )
    again = by_number(replayed(rows, file, timetable=[*late[:2], new]))
    assert again == outcomes


def test_join_does_not_start_workers_that_are_added_later() -> None:
    events = [JoinEvent(at_s=1.0), AddEvent(at_s=20.0, group="w"), DieEvent(at_s=30.0, group="w")]
    rows = [row(number, 10.0 * number, [number], output_tokens=2) for number in range(5)]
    outcomes = by_number(replayed(rows, fleet("workers: [{name: w}]"), timetable=events))
    assert [outcome.decode for outcome in outcomes[:2]] == [1, 1]
    assert outcomes[2].decode in (1, 2)
    assert [outcome.error for outcome in outcomes[3:]] == ["no_eligible_worker"] * 2


def test_added_engine_must_have_room_for_every_request_too() -> None:
    file = fleet("workers: [{name: w}]")
    small = AddEvent.model_validate(
        {"at_s": 1.0, "workers": [{"name": "small", "engine": {"total_kv_blocks": 4}}]}
    )
    sim = SimFleet(
        file,
        config=file.router,
        rule=None,
        seed=0,
        call_soon=lambda call: call(),
        steps=plan_timetable([small], file),
    )
    with pytest.raises(ConfigError, match="room for 256"):
        check_room(row(0, 0.0, [1, 2, 3, 4]), sim)


# Laws

ROWS = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 60)),
    min_size=1,
    max_size=15,
)
MOMENTS = st.lists(st.floats(0.0, 60.0), max_size=5)


def made(drawn: list[tuple[float, list[int], int]]) -> list[TraceRequest]:
    ordered = sorted(drawn, key=lambda each: each[0])
    return [row(n, at_s, pieces, output_tokens=output) for n, (at_s, pieces, output) in enumerate(ordered)]


@given(drawn=ROWS, moments=MOMENTS, zones=st.sampled_from([("a", "a"), ("a", "b"), ("b", "b")]))
@settings(max_examples=25, deadline=None)
def test_a_link_at_factor_1_changes_nothing(
    drawn: list[tuple[float, list[int], int]], moments: list[float], zones: tuple[str, str]
) -> None:
    events = [
        LinkEvent(at_s=at_s, between=zones, bandwidth_factor=1.0, latency_factor=1.0)
        for at_s in sorted(moments)
    ]
    file = fleet(TWO_ZONES)
    same(replayed(made(drawn), file, timetable=events), replayed(made(drawn), file))


@given(drawn=ROWS)
@settings(max_examples=15, deadline=None)
def test_event_at_time_zero_equals_the_same_setting_in_the_fleet_file(
    drawn: list[tuple[float, list[int], int]],
) -> None:
    rows = made(drawn)
    file = fleet(PAIRS)
    expected: dict[str, tuple[FleetFile, list[TimetableEvent]]] = {
        "label": (
            fleet(
                PAIRS.replace(
                    "name: pb, role: prefill, domains: {zone: b}",
                    "name: pb, role: prefill, domains: {zone: a}",
                )
            ),
            [LabelEvent(at_s=0.0, group="pb", set={"zone": "a"})],
        ),
        "policy": (
            fleet(
                "router: {overlap_score_weight: 3.0}\n"
                + PAIRS.replace("zone}", "zone, enforcement: fallback}", 1)
            ),
            [PolicyEvent(at_s=0.0, set={"kv_transfer.enforcement": "fallback", "overlap_score_weight": 3.0})],
        ),
        "thresholds": (
            fleet(f"{THRESHOLDS}\n{PAIRS}"),
            [
                PolicyEvent(
                    at_s=0.0,
                    set={"active_decode_blocks_threshold": 0.0005, "active_prefill_tokens_threshold": 500},
                )
            ],
        ),
        "add": (
            fleet(PAIRS.replace("- {name: db, role: decode, ", "- {name: db, role: decode, replicas: 3, ")),
            [AddEvent(at_s=0.0, group="db", replicas=2)],
        ),
        "link": (
            fleet(PAIRS.replace("13107200.0", "1310720.0")),
            [LinkEvent(at_s=0.0, between=(zone, zone), bandwidth_bytes_per_s=1_310_720.0) for zone in "ab"],
        ),
        "there and back": (
            file,
            [
                LabelEvent(at_s=0.0, group="pb", set={"zone": "a"}),
                LabelEvent(at_s=0.0, group="pb", set={"zone": "b"}),
                PolicyEvent(at_s=0.0, set={"kv_transfer": None}),
                PolicyEvent(at_s=0.0, set={"kv_transfer.domain": "zone"}),
                LinkEvent(at_s=0.0, between=("a", "a"), bandwidth_factor=0.25),
                LinkEvent(at_s=0.0, between=("a", "a"), bandwidth_factor=1.0),
            ],
        ),
    }
    for other, events in expected.values():
        same(replayed(rows, file, timetable=events), replayed(rows, other))


# Mistakes

WRONG = {
    "a word that is none": (
        "{at_s: 1, what: dye}",
        "yaml:2: events[0].what: must be one of",
        "did you mean die?",
    ),
    "nothing": ("{at_s: 1}", "events[0].what: is required", "policy"),
    "no mapping": ("5", "events[0]: must be a mapping", ""),
    "no time": ("{what: die}", "events[0].at_s: is required", ""),
    "NaN": ("{at_s: .nan, what: die}", "events[0].at_s: must be a finite number", "nan"),
    "before the beginning": ("{at_s: -1, what: die}", "events[0].at_s: must be ≥ 0", "-1"),
    "a key that is none": ("{at_s: 1, what: die, grop: w}", "events[0].grop: unknown key", "group?"),
    "a group that is none": (
        "{at_s: 1, what: die, group: paa}",
        "events[0].group: no worker",
        "did you mean pa?",
    ),
    "a worker that is none": (
        "{at_s: 1, what: drain, worker: 9}",
        "events[0].worker: the fleet has no worker 9 then",
        "1 to ",
    ),
    "no number of a worker": ("{at_s: 1, what: drain, worker: 0}", "events[0].worker: must be ≥ 1", "0"),
    "a worker that is elsewhere": ("{at_s: 1, what: die, worker: 1, group: db}", "events[0]: no worker", ""),
    "a level that is none": (
        "{at_s: 1, what: die, domains: {zne: a}}",
        "events[0].domains.zne",
        "mean zone?",
    ),
    "a place that is none": ("{at_s: 1, what: die, domains: {zone: z}}", "events[0]: no worker", ""),
    "a label that is none": (
        "{at_s: 1, what: label, set: {rack: a}}",
        "events[0].set.rack: must be one of",
        "",
    ),
    "a label of nothing": ("{at_s: 1, what: label, set: {}}", "events[0].set: must not be empty", ""),
    "one end": ("{at_s: 1, what: link, between: [a], latency_s: 1}", "events[0].between: must have ≥ 2", ""),
    "an end that is none": (
        "{at_s: 1, what: link, between: [a, z], latency_s: 1}",
        "events[0].between[1]: no worker has zone=z",
        "",
    ),
    "a link's level": (
        "{at_s: 1, what: link, level: row, between: [a, b], latency_s: 1}",
        "events[0].level",
        "zone",
    ),
    "nothing new": (
        "{at_s: 1, what: link, between: [a, b]}",
        "events[0]: must change something",
        "latency_s",
    ),
    "twice": (
        "{at_s: 1, what: link, between: [a, b], latency_s: 1, latency_factor: 2}",
        "events[0].latency_s: contradicts latency_factor",
        "",
    ),
    "no bandwidth": (
        "{at_s: 1, what: link, between: [a, b], bandwidth_factor: 0}",
        "events[0].bandwidth_factor: must be ≥",
        "",
    ),
    "a policy that is none": (
        "{at_s: 1, what: policy, set: {kv_transfer.enforcement: requird}}",
        "events[0].set.kv_transfer.enforcement: must be",
        "'requird'",
    ),
    "a policy without its weight": (
        "{at_s: 1, what: policy, set: {kv_transfer.enforcement: preferred}}",
        "events[0].set: kv_transfer.preferred_weight is required",
        "",
    ),
    "a setting that shapes the router": (
        "{at_s: 1, what: policy, set: {router.kv_events: false}}",
        "events[0].set.router.kv_events: cannot change",
        "",
    ),
    "a setting out of range": (
        "{at_s: 1, what: policy, set: {overlap_score_weight: -1}}",
        "events[0].set.overlap_score_weight: router.overlap_score_weight must be ≥ 0",
        "-1",
    ),
    "nobody": ("{at_s: 1, what: add}", "events[0]: must have group, or workers", ""),
    "more of none": (
        "{at_s: 1, what: add, group: daa}",
        "events[0].group: must be a group of the fleet",
        "da?",
    ),
    "both": (
        "{at_s: 1, what: add, group: da, workers: [{name: x}]}",
        "events[0].workers: contradicts group",
        "",
    ),
    "replicas of what": (
        "{at_s: 1, what: add, replicas: 2, workers: [{name: x}]}",
        "events[0].replicas: is of group",
        "",
    ),
    "too many": (
        "{at_s: 1, what: add, group: da, replicas: 1024}",
        "events[0].replicas: of the group with those before must be ≤ 1024",
        "",
    ),
    "a name that is taken": (
        "{at_s: 1, what: add, workers: [{name: pa, role: decode}]}",
        "events[0].workers[0].name: must be unique",
        "",
    ),
    "an unknown key of a group": (
        "{at_s: 1, what: add, workers: [{name: x, rol: decode}]}",
        "events[0].workers[0].rol: unknown key",
        "role?",
    ),
    "a real engine": (
        "{at_s: 1, what: add, workers: [{name: x, engine: {kind: vllm, url: 'http://x:1'}}]}",
        "events[0].workers[0].engine.kind: a replay runs mock engines",
        "",
    ),
    "out of order": (
        "{at_s: 2, what: die}\n- {at_s: 1, what: join}",
        "events.yaml:3: events[1].at_s: must be ≥ 2",
        "order of time",
    ),
    "before it is there": (
        "{at_s: 1, what: die, group: late}\n- {at_s: 2, what: add, workers: [{name: late}]}",
        "events[0].group: no worker",
        "",
    ),
}


@pytest.mark.parametrize(("event", "where", "what"), WRONG.values(), ids=WRONG)
def test_timetable_mistake_is_refused_with_file_line_and_field(
    event: str, where: str, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "events.yaml"
    path.write_text(f"events:\n- {event}\n")
    with pytest.raises(ConfigError) as refused:
        plan_timetable(read_timetable(path), fleet(PAIRS))
    message = refused.value.message
    assert message.startswith(f"{path}:")
    assert where in message
    assert what in message


def test_all_mistakes_of_a_timetable_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.yaml"
    path.write_text("event: []\nevents:\n- {at_s: -1, what: die}\n- {at_s: 1, what: bye}\n")
    with pytest.raises(ConfigError) as refused:
        read_timetable(path)
    lines = refused.value.message.splitlines()
    assert [line.removeprefix(str(path))[:3] for line in lines] == [":1:", ":3:", ":4:"]
    for content in ("", "events: 5\n"):
        path.write_text(content or "{}\n")
        with pytest.raises(ConfigError, match="events"):
            read_timetable(path)


def test_timetable_with_every_kind_of_event_is_read_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "events.yaml"
    path.write_text(
        "events:\n"
        "- {at_s: 100, what: die, group: db}\n"
        "- {at_s: 200, what: link, between: [a, b], bandwidth_factor: 0.1}\n"
        "- {at_s: 250, what: label, group: pb, set: {zone: a}}\n"
        "- {at_s: 300, what: policy, set: {kv_transfer.enforcement: fallback, overlap_score_weight: 2}}\n"
        "- {at_s: 400, what: add, group: da, replicas: 2}\n"
        "- {at_s: 400, what: add, workers: [{name: more, role: decode, domains: {zone: b}}]}\n"
        "- {at_s: 500, what: join, domains: {zone: b}}\n"
        "- {at_s: 500, what: drain, worker: 7}\n"
    )
    events = read_timetable(path)
    assert [type(event) for event in events] == [
        DieEvent,
        LinkEvent,
        LabelEvent,
        PolicyEvent,
        AddEvent,
        AddEvent,
        JoinEvent,
        DrainEvent,
    ]
    steps = plan_timetable(events, fleet(PAIRS))
    assert [[worker_id for worker_id, _ in step.added] for step in steps[4:6]] == [[5, 6], [7]]
    rows = [row(number, 50.0 * number, [number, 1, 2]) for number in range(14)]
    assert [outcome.error for outcome in by_number(replayed(rows, fleet(PAIRS), timetable=events))] == [
        ""
    ] * 14
