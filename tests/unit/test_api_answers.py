"""Answers as types: what an older router does not say is no reason to refuse all that it says."""

from typing import Any

import msgspec
import pytest

from kvrouter.api.client import AskFailed, decode_answer
from kvrouter.api.cordons import CordonList
from kvrouter.api.decisions import Decisions, Explanation, LastDecisions
from kvrouter.api.fleet import Fleet, Flows
from kvrouter.api.pages import ModelList

PICK = {"worker_id": 1, "dp_rank": 0, "overlap_blocks": 0, "candidates": 1}
CHOICE = {"prefill": None, "decode": PICK, "constraint": None, "fallback_used": False, "cross_domain": False}
LEAST: dict[Any, Any] = {
    Fleet: {
        "models": [{"model": "m"}],
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
def test_a_router_that_says_the_least_is_read(kind: type) -> None:
    said = {**LEAST[kind], "added_by_a_newer_router": {}}
    assert isinstance(decode_answer(msgspec.json.encode(said), kind), kind)


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("answer", [b"{}", b"[]", b"<html>", b""])
def test_another_programs_answer_is_none_of_a_routers(kind: type, answer: bytes) -> None:
    with pytest.raises(AskFailed, match="the answer is not a router's"):
        decode_answer(answer, kind)


def test_what_is_read_is_written_as_it_was() -> None:
    """No field is lost or added on the way: nothing but a weight that a policy has not is left out."""
    for kind, said in LEAST.items():
        again = msgspec.json.encode(decode_answer(msgspec.json.encode(said), kind))
        assert msgspec.json.encode(decode_answer(again, kind)) == again
        assert [*msgspec.json.decode(again)] == [*kind.__struct_fields__]
