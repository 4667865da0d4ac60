"""Answers as types: what an older router does not say is no reason to refuse all that it says."""

from typing import Any

import msgspec
import pytest

from kvrouter.api.client import AskFailed, _error, decode_answer
from kvrouter.api.cordon_schema import CordonList
from kvrouter.api.decision_schema import Decisions, Explanation, LastDecisions
from kvrouter.api.fleet_schema import Fleet, Flows
from kvrouter.api.health_schema import ModelList
from kvrouter.cli.doctor.findings import Problem, Severity
from kvrouter.cli.doctor.place_checks import zones
from kvrouter.cli.doctor.reading import Counts, Reading
from kvrouter.cli.fleet.show import running_shown

PICK = {"worker_id": 1, "dp_rank": 0, "overlap_blocks": 0, "candidates": 1}
CHOICE = {"prefill": None, "decode": PICK, "constraint": None, "fallback_used": False, "cross_domain": False}
LEAST: dict[Any, Any] = {
    Fleet: {
        "models": [{"model": "m", "block_size": 16}],
        "workers": [
            {
                "worker_id": 1,
                "model": "m",
                "role": "both",
                "engine": None,
                "domains": {},
                "ranks": [{"total_blocks": None}],
            }
        ],
    },
    Flows: {"flows": []},
    LastDecisions: {
        "decisions": [{"request_id": "r", "model": "m", "attempt": 0, "decided_at": 1.5, **CHOICE}]
    },
    Decisions: {
        "request_id": "r",
        "attempts": [{"attempt": 0, "decided_at": 1.5, "mode": "kv", **CHOICE}],
    },
    Explanation: {
        "request_id": "r",
        "model": "m",
        "mode": "kv",
        "isl_tokens": 1,
        "blocks": 1,
        "prefill": None,
        "decode": {"chosen": None, "candidates": []},
        "constraint": None,
        "fallback_used": False,
        "error": {"code": "c", "message": "m"},
    },
    CordonList: {"cordons": []},
    ModelList: {"data": [{"id": "m"}]},
}


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_the_shortest_answers_of_older_routers_are_decoded(kind: type) -> None:
    said = {**LEAST[kind], "added_by_a_newer_router": {}}
    assert isinstance(decode_answer(msgspec.json.encode(said), kind), kind)


def test_unknown_roles_and_policies_of_newer_routers_are_shown() -> None:
    of_zone = {"domains": {"zone": "a"}, "kv_transfer": {"enforcement": "soft", "domain": "zone"}}
    workers = [{**LEAST[Fleet]["workers"][0], **of_zone, "role": role} for role in ("encode", "prefill")]
    workers[0] |= {"domains": {"zone": "b"}}
    said = {"models": LEAST[Fleet]["models"], "workers": workers}
    fleet = decode_answer(msgspec.json.encode(said), Fleet)
    group, _ = running_shown("here", fleet).groups
    assert (group.role, group.kv_transfer) == ("encode", "soft on zone")
    reading = Reading(url="here", fleet=fleet, served=frozenset(), counts=Counts(), gauges=Counts())
    (found,) = [each for each in zones(reading) if isinstance(each, Problem)]
    assert (found.severity, found.subject) == (Severity.NOTE, "zone=a (m)")


@pytest.mark.parametrize("code", [b"400", b"null", b'"bad"'])
def test_an_error_message_is_decoded_with_any_code(code: bytes) -> None:
    assert _error(b'{"error":{"message":"no","code":' + code + b"}}").message == "no"


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("answer", [b"{}", b"[]", b"<html>", b""])
def test_an_answer_of_another_program_is_refused(kind: type, answer: bytes) -> None:
    with pytest.raises(AskFailed, match="the answer is not a router's"):
        decode_answer(answer, kind)


def test_decoded_answers_encode_to_the_same_bytes() -> None:
    """No field is lost or added on the way: nothing but a weight that a policy has not is left out."""
    for kind, said in LEAST.items():
        again = msgspec.json.encode(decode_answer(msgspec.json.encode(said), kind))
        assert msgspec.json.encode(decode_answer(again, kind)) == again
        assert [*msgspec.json.decode(again)] == [*kind.__struct_fields__]
