"""Recorded fleets: what a recording says of its workers becomes a fleet file, and their changes events."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrouter.cli.replay.recorded_inputs import RECORDED, RecordedChanges, recorded_changes
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.recording.schema import FleetChange, FleetRecord, Worker
from kvrouter.settings.problems import parse_document
from kvrouter.sim.past.fleet_history import FleetHistory, FleetNote, Span, fleet_history
from kvrouter.sim.past.recorded_events import RecordedEvents, recorded_events
from kvrouter.sim.past.recorded_fleet import recorded_fleet
from kvrouter.sim.replay.dispatch import ByTimeStamp
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.replay.timetable_plan import plan_timetable
from tests.testing.replays import row

FILE = Path("recording.jsonl.gz")
POLICY: Mapping[str, Any] = {"transfer_domain": "zone", "enforcement": "required"}
ZONES = "topology: {levels: [zone]}\n"


def worker(name: int, role: str = "both", zone: str = "a", **more: Any) -> Worker:
    fields: dict[str, Any] = {
        "worker": str(name), "model": "m", "role": role, "block_size": 64, "context_length": 4096,
        "domains": {"zone": zone} if zone else {}, "kv_blocks": 512,
    }  # fmt: skip
    return Worker(**fields | more)


Change = tuple[float, FleetChange, Sequence[Worker]]


def notes(*changes: Change, recording: str = "r", line: int = 1) -> list[FleetNote]:
    """Fleet records on consecutive lines of a file."""
    return [
        FleetNote(
            recording, at_s, FleetRecord(at_s=at_s, change=change, workers=tuple(workers)), FILE, line + n
        )
        for n, (at_s, change, workers) in enumerate(changes)
    ]


def history(*changes: Change, until_s: float = 100.0) -> FleetHistory:
    """What one recording says, whose first request came at 10 s."""
    return fleet_history(notes(*changes), {"r": Span(10.0, until_s)}, model="m", block_size=64)


def joined(at_s: float, *workers: Worker) -> list[Change]:
    return [(at_s, FleetChange.JOINED, [each]) for each in workers]


def events(of: FleetHistory, *, speedup: float = 1.0, policies: bool = True) -> RecordedEvents:
    made = recorded_fleet(of, "rec")
    found = recorded_events(of, made.numbering, speedup=speedup, policies=policies)
    plan_timetable(found.events, load_fleet(made.document).fleet)
    return found


def said(found: RecordedEvents) -> list[dict[str, Any]]:
    """The events as an events file has them."""
    entries = parse_document(found.text, "events").content["events"]
    assert isinstance(entries, list)
    assert len(entries) == len(found.events)
    return entries


# The fleet


def test_equal_workers_form_a_group_with_all_their_recorded_fields() -> None:
    taints = ("dynamo.topology/zone=b", "gpu/h100", "kvrouter.adapter/french")
    two = [worker(number, "decode", "b", taints=taints) for number in (30, 4)]
    one = worker(
        7, "prefill", "a", dp_size=2, kv_bytes_per_token=99, max_num_seqs=8, max_num_batched_tokens=2048,
        context_length=8192, **POLICY,
    )  # fmt: skip
    seen = history(*joined(1.0, two[0], one, two[1]))
    made = recorded_fleet(seen, "rec")
    assert made.numbering.numbers == {"4": 1, "30": 2, "7": 3}
    file = load_fleet(made.document).fleet
    assert [(group.name, group.role.value, group.n_workers) for group in file.workers] == [
        ("decode-1", "decode", 2),
        ("prefill-1", "prefill", 1),
    ]
    decode, prefill = file.workers
    assert (decode.taints, dict(decode.domains), decode.dp_size) == (("gpu/h100",), {"zone": "b"}, None)
    assert (prefill.dp_size, prefill.taints) == (2, ())
    engine = prefill.engine.model_dump()
    assert (engine["total_kv_blocks"], engine["kv_bytes_per_token"]) == (512, 99)
    assert (engine["max_num_seqs"], engine["max_num_batched_tokens"]) == (8, 2048)
    (model,) = file.models
    assert (model.name, model.block_size, model.context_length) == ("m", 64, 8192)
    assert file.topology.levels == ("zone",)
    assert file.kv_transfer is None  # most workers have none


def test_levels_follow_the_cards_order_or_else_the_number_of_values() -> None:
    racks = [worker(n, domains={"rack": f"r{n}", "zone": "a"}, **POLICY) for n in (1, 2)]
    content = recorded_fleet(history(*joined(1.0, *racks)), "rec").document.content
    assert content["topology"] == {"levels": ["zone", "rack"]}
    assert content["kv_transfer"] == {"domain": "zone", "enforcement": "required"}
    ordered = worker(3, domains={"rack": "r", "zone": "a"}, levels=("rack", "zone"))
    content = recorded_fleet(history(*joined(1.0, ordered)), "rec").document.content
    assert content["topology"] == {"levels": ["rack", "zone"]}


def test_invalid_recorded_worker_is_refused_by_file_and_line() -> None:
    made = recorded_fleet(history(*joined(1.0, worker(1), worker(2, domains={"Zone!": "a"}))), "rec")
    with pytest.raises(ConfigError, match=r"recording\.jsonl\.gz:2: worker 2: .*lower-case"):
        load_fleet(made.document)
    with pytest.raises(ConfigError, match="no worker of m is recorded there"):
        recorded_fleet(history(), "rec")


# What happens to it


def test_each_recorded_change_is_an_event_at_its_time_after_the_first_request() -> None:
    workers = [worker(n) for n in (1, 2, 3, 4)]
    found = events(
        history(
            *joined(1.0, *workers),
            (12.0, FleetChange.LEFT, [workers[0]]),
            *joined(13.0, workers[0]),
            (14.0, FleetChange.CHANGED, [worker(2, draining=True)]),
            (15.0, FleetChange.CHANGED, [worker(2)]),
            (16.0, FleetChange.CHANGED, [worker(3, zone="b")]),
            (16.5, FleetChange.CHANGED, [worker(3, zone="")]),
            *joined(17.0, worker(9)),
            *joined(18.0, worker(10, "decode", "c", kv_blocks=99)),
            (19.0, FleetChange.LEFT, [worker(10, "decode", "c", kv_blocks=99)]),
            *joined(20.0, workers[3]),
            (101.0, FleetChange.LEFT, [workers[1]]),
        )
    )
    assert said(found) == [
        {"at_s": 2.0, "what": "die", "worker": 1},
        {"at_s": 3.0, "what": "join", "worker": 1},
        {"at_s": 4.0, "what": "drain", "worker": 2},
        {"at_s": 5.0, "what": "join", "worker": 2},
        {"at_s": 6.0, "what": "label", "worker": 3, "set": {"zone": "b"}},
        {"at_s": 6.5, "what": "label", "worker": 3, "set": {"zone": None}},
        {"at_s": 7.0, "what": "add", "group": "workers-1"},
        {
            "at_s": 8.0,
            "what": "add",
            "workers": [
                {
                    "name": "joined-6", "role": "decode", "domains": {"zone": "c"},
                    "engine": {"kind": "mock", "total_kv_blocks": 99},
                }
            ],
        },
        {"at_s": 9.0, "what": "die", "worker": 6},
        {"at_s": 10.0, "what": "die", "worker": 4},  # it started again, and nobody saw it leave
        {"at_s": 10.0, "what": "join", "worker": 4},
    ]  # fmt: skip
    assert found.left_out == {}
    assert "# worker 10, recording.jsonl.gz:12" in found.text


def test_fleet_repeated_at_the_head_of_a_file_is_no_change() -> None:
    one, two = worker(1), worker(2)
    everybody: Change = (11.0, FleetChange.ALL, [one, two])
    assert said(events(history((1.0, FleetChange.ALL, [one, two]), *joined(10.5, one, two), everybody))) == []
    # a change was dropped, and the next file knows of it; its head bears the arrival of its first request
    of_two_files = history(*joined(1.0, one), (20.0, FleetChange.CHANGED, [worker(1, zone="b")]), everybody)
    assert said(events(of_two_files)) == [
        {"at_s": 10.0, "what": "label", "worker": 1, "set": {"zone": "b"}},
        {"at_s": 10.0, "what": "label", "worker": 1, "set": {"zone": "a"}},
        {"at_s": 10.0, "what": "add", "group": "workers-1"},
    ]


def test_silent_worker_that_leaves_was_dead_and_one_that_answers_was_drained() -> None:
    silent = worker(1, alive=False)
    dies = events(
        history(
            *joined(1.0, worker(1)), (12.0, FleetChange.SILENT, [silent]), (15.0, FleetChange.LEFT, [silent])
        )
    )
    assert said(dies) == [{"at_s": 2.0, "what": "die", "worker": 1}]
    drains = events(
        history(
            *joined(1.0, worker(1)),
            (12.0, FleetChange.SILENT, [silent]),
            (15.0, FleetChange.ANSWERS, [worker(1)]),
            (16.0, FleetChange.LEFT, [worker(1)]),
        )
    )
    assert said(drains) == [
        {"at_s": 2.0, "what": "drain", "worker": 1},
        {"at_s": 5.0, "what": "join", "worker": 1},
        {"at_s": 6.0, "what": "die", "worker": 1},
    ]
    assert said(events(history(*joined(1.0, worker(1), worker(2, draining=True))))) == [
        {"at_s": 0.0, "what": "drain", "worker": 2}
    ]


def test_policy_event_comes_when_most_workers_have_another_policy() -> None:
    named: Mapping[str, Any] = {
        "transfer_domain": "zone",
        "enforcement": "preferred",
        "preferred_weight": 0.5,
    }
    rolled = history(
        *joined(1.0, *(worker(n, **POLICY) for n in (1, 2, 3))),
        *((10.0 + n, FleetChange.CHANGED, [worker(n, **named)]) for n in (1, 2, 3)),
    )
    (policy,) = said(events(rolled))
    content = {"domain": "zone", "enforcement": "preferred", "preferred_weight": 0.5}
    assert policy == {"at_s": 2.0, "what": "policy", "set": {"kv_transfer": content}}
    without = events(rolled, policies=False)
    assert (said(without), without.left_out) == ([], {"transfer policy": 1})


def test_changes_without_an_event_are_counted_and_speedup_scales_times() -> None:
    grows = worker(1, kv_blocks=600, taints=("new/taint",))
    found = events(
        history(
            *joined(1.0, worker(1)), (12.0, FleetChange.CHANGED, [grows]), (13.0, FleetChange.LEFT, [grows])
        ),
        speedup=4.0,
    )
    assert found.left_out == {"kv_blocks": 1, "taints": 1}
    assert said(found) == [{"at_s": 0.75, "what": "die", "worker": 1}]


def test_latest_begun_of_several_recordings_defines_the_fleet() -> None:
    one, two = worker(1), worker(2)
    seen = fleet_history(
        [
            *notes(*joined(1.0, one, two), (14.0, FleetChange.LEFT, [two]), recording="r"),
            *notes(*joined(29.0, one, worker(3)), recording="later"),
            *notes(*joined(11.0, one, two), (14.1, FleetChange.LEFT, [two]), recording="with it", line=50),
        ],
        {"r": Span(10.0, 20.0), "with it": Span(12.0, 15.0), "later": Span(30.0, 40.0)},
        model="m",
        block_size=64,
    )
    assert sorted(seen.initial) == ["1", "2"]
    assert [(move.at_s, move.move.value, move.recorded.worker.worker) for move in seen.moves] == [
        (pytest.approx(4.1), "left", "2"),
        (20.0, "joined", "3"),
    ]


def test_workers_of_other_models_are_left_out() -> None:
    other = worker(5, model="other")
    seen = history(*joined(1.0, worker(1), other), (12.0, FleetChange.LEFT, [other]))
    assert (sorted(seen.initial), seen.moves) == (["1"], ())
    late = history(*joined(12.0, worker(1)), (14.0, FleetChange.LEFT, [worker(1)]))
    assert (sorted(late.initial), [move.at_s for move in late.moves]) == (["1"], [4.0])


# Another fleet


def named(text: str) -> FleetFile:
    return load_fleet(parse_document(f"version: 1\nmodels: [{{name: m}}]\n{text}", "fleet.yaml")).fleet


PAIR = history(
    *joined(1.0, worker(70, "prefill"), worker(80, "decode", **POLICY), worker(60, "decode")),
    (12.0, FleetChange.LEFT, [worker(80, "decode", **POLICY)]),
    *joined(13.0, worker(90, "decode")),
)
PAIR_FILE = ZONES + (
    "workers:\n- {name: p, role: prefill, domains: {zone: a}}\n"
    "- {name: d, role: decode, replicas: 2, domains: {zone: a}, engine: {total_kv_blocks: 9999}}\n"
)


def changes_over(of: FleetHistory, *files: FleetFile, events: Path | None = None) -> RecordedChanges:
    return recorded_changes(of, None, files, events=events, speedup=1.0)


def test_recorded_changes_apply_to_another_fleet_of_equal_roles_and_places() -> None:
    found = changes_over(PAIR, named(PAIR_FILE))
    assert [(type(event).__name__, event.model_dump(exclude_unset=True)) for event in found.events] == [
        ("DieEvent", {"at_s": 2.0, "worker": 3}),
        ("AddEvent", {"at_s": 3.0, "group": "d"}),
    ]
    assert found.notes == ("2 recorded changes of the fleet applied",)
    plan_timetable(found.events, named(PAIR_FILE))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            PAIR_FILE.replace("replicas: 2", "replicas: 3"),
            "it has 3 workers like worker 60: decode, zone=a; 2",
        ),
        (PAIR_FILE + "- {name: more}\n", "1 of its workers have roles and domains that none had"),
        (PAIR_FILE.replace("zone", "rack"), "its topology.levels have no zone"),
    ],
)
def test_recorded_changes_are_not_applied_to_a_different_fleet_with_a_note(text: str, why: str) -> None:
    found = changes_over(PAIR, named(text))
    assert found.events == ()
    (note,) = found.notes
    assert note.startswith("2 recorded changes of the fleet not applied: ")
    assert why in note
    with pytest.raises(ConfigError, match="2 recorded changes cannot happen to this fleet") as caught:
        changes_over(PAIR, named(text), events=RECORDED)
    assert (caught.value.param, why in caught.value.message) == ("events", True)
    both = changes_over(PAIR, named(PAIR_FILE), named(text))
    assert both.events == ()
    without = history(*joined(1.0, worker(1)))
    assert changes_over(without, named(text)) == RecordedChanges()


def test_own_policy_of_a_fleet_file_is_not_replaced_by_the_recorded_one() -> None:
    rolled = history(
        *joined(1.0, worker(1, **POLICY)), (12.0, FleetChange.CHANGED, [worker(1, transfer_domain=None)])
    )
    text = ZONES + "workers: [{name: w, domains: {zone: a}}]\n"
    same = changes_over(rolled, named(text + "kv_transfer: {domain: zone}\n"))
    assert [type(event).__name__ for event in same.events] == ["PolicyEvent"]
    own = changes_over(rolled, named(text + "kv_transfer: {domain: zone, enforcement: fallback}\n"))
    assert own.events == ()
    assert own.notes == ("recorded changes that this replay does not make: 1 of transfer policy",)


# The law


@st.composite
def recorded_lives(draw: st.DrawFn) -> list[Change]:
    """What a frontend may record: workers join, leave, drain, fall silent, move, in any order."""
    here: dict[int, Worker] = {}
    changes: list[Change] = []
    for number in range(draw(st.integers(1, 3))):
        here[number] = worker(number, draw(st.sampled_from(["prefill", "decode", "both"])))
    changes += joined(1.0, *here.values())
    for step in range(draw(st.integers(0, 12))):
        number = draw(st.integers(0, 4))
        known = here.get(number)
        at_s = 11.0 + step
        if known is None or draw(st.integers(0, 3)) == 0:
            role = draw(st.sampled_from(["prefill", "decode", "both"]))
            here[number] = worker(number, role, draw(st.sampled_from(["a", "b", ""])))
            changes += joined(at_s, here[number])
        elif draw(st.booleans()):
            changes.append((at_s, FleetChange.LEFT, [here.pop(number)]))
        else:
            zone, drains, alive = draw(
                st.tuples(st.sampled_from(["a", "b", ""]), st.booleans(), st.booleans())
            )
            here[number] = worker(number, known.role, zone, draining=drains, alive=alive)
            changes.append((at_s, FleetChange.CHANGED, [here[number]]))
    return changes


@given(recorded_lives())
@settings(max_examples=60, deadline=None)
def test_replay_of_all_events_ends_with_the_last_recorded_fleet(changes: list[Change]) -> None:
    seen = history(*changes)
    assume(any(of.worker.role != "prefill" for of in seen.initial.values()))
    file = load_fleet(recorded_fleet(seen, "rec").document).fleet
    simulation = Simulation(
        file,
        [row(0, 0.0, [1]), row(1, 60.0, [1])],
        config=file.router,
        dispatch=ByTimeStamp(),
        piece_tokens=64,
        timetable=events(seen).events,
    )
    simulation.run()
    last: dict[str, Worker] = {}
    for _, change, (of,) in changes:
        last.pop(of.worker, None) if change is FleetChange.LEFT else last.update({of.worker: of})
    expected = Counter(
        (of.role, tuple(of.domains.items()), of.alive and not of.draining) for of in last.values()
    )
    found = Counter(
        (card.role.value, tuple(card.runtime_config.topology_domains.items()), card.takes_new_requests)
        for card in simulation.fleet.fleet
    )
    assert found == expected
    assert all(card.worker_id >= WorkerId(1) for card in simulation.fleet.fleet)
