"""Events of a timetable in words."""

import pytest

from kvrouter.sim.replay.timetable import KINDS, TimetableEntry, entry_of


@pytest.mark.parametrize(
    ("what", "fields", "which", "change"),
    [
        ("die", {"group": "d"}, "group d", ""),
        ("die", {}, "all workers", ""),
        ("drain", {"worker": 7}, "worker 7", ""),
        ("join", {"group": "d", "domains": {"zone": "a", "rack": "r"}}, "group d, zone=a, rack=r", ""),
        (
            "label",
            {"domains": {"zone": "a"}, "set": {"zone": "b", "rack": None}},
            "zone=a",
            "zone=b, no rack",
        ),
        (
            "link",
            {"between": ["a", "b"], "bandwidth_factor": 0.1, "latency_s": 0.25},
            "a – b",
            "bandwidth × 0.1, latency 0.25 s",
        ),
        (
            "link",
            {"between": ["a", "a"], "level": "zone", "bandwidth_bytes_per_s": 1e9, "latency_factor": 2},
            "zone a – a",
            "bandwidth 1e+09 bytes/s, latency × 2",
        ),
        (
            "policy",
            {"set": {"kv_transfer.enforcement": "fallback", "overlap_score_weight": 2}},
            "kv_transfer.enforcement, overlap_score_weight",
            "fallback, 2",
        ),
        (
            "policy",
            {"set": {"kv_transfer": None, "track_prefill_tokens": False}},
            "kv_transfer, track_prefill_tokens",
            "none, false",
        ),
        ("policy", {"set": {"kv_transfer": {"domain": "zone"}}}, "kv_transfer", "{domain: zone}"),
        ("add", {"group": "d"}, "group d", "1 worker more"),
        ("add", {"workers": [{"name": "x", "replicas": 2}, {"name": "y"}]}, "group x, y", "3 workers more"),
    ],
)
def test_event_text_names_its_kind_its_target_and_its_change(
    what: str, fields: dict[str, object], which: str, change: str
) -> None:
    event = KINDS[what].model_validate({"at_s": 7.5, **fields})
    assert entry_of(event) == TimetableEntry(7.5, what, which, change)
