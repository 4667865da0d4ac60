"""``/v1/cordons`` over a real socket."""

from collections.abc import Mapping

import pytest

from tests.testing.frontend_harness import error_of, metrics_of, running_frontend, text_answer
from tests.testing.router_harness import card, decode_card, prefill_card

PATH = "/v1/cordons"


async def test_a_zone_is_cordoned_listed_and_uncordoned() -> None:
    async with running_frontend(card(1, zone="a"), card(2, zone="b"), script=text_answer("ok")) as frontend:
        body = {"level": "zone", "name": "a", "reason": "rack 4", "by": "ann"}
        made = await frontend.http.post(PATH, json=body)
        assert made.status_code == 200
        answer = made.json()
        assert answer.pop("at").endswith("Z")
        worker = {"worker_id": 1, "model": "mock", "role": "both", "alive": True, "running_requests": 0}
        cordon = {**body, "source": "call", "cluster": None, "workers": [worker]}
        left = [{"model": "mock", "role": "both", "workers": 2, "left": 1}]
        assert answer == {
            **cordon,
            "changed": True,
            "warnings": [],
            "remaining": left,
            "routers_look_every_s": 1.0,
        }
        listed = (await frontend.http.get(PATH)).json()
        (found,) = listed.pop("cordons")
        assert {**cordon, "at": found["at"]} == found
        assert listed == {
            "remaining": left,
            "store": {"reachable": True, "why": None},
            "routers_look_every_s": 1.0,
        }
        fleet = (await frontend.http.get("/v1/fleet")).json()["workers"]
        assert [[each["name"] for each in worker["cordons"]] for worker in fleet] == [["a"], []]
        page = await metrics_of(frontend)
        assert [page["kvrouter_worker_cordoned", worker] for worker in "12"] == [1.0, 0.0]
        assert (await frontend.chat()).headers["x-kvrouter-decode-worker"] == "2"
        again = (await frontend.http.post(PATH, json={"level": "zone", "name": "a"})).json()
        assert (again["changed"], again["reason"], again["at"]) == (False, "rack 4", found["at"])
        for changed in (True, False):
            gone = await frontend.http.delete(PATH, params={"level": "zone", "name": "a"})
            assert (gone.status_code, gone.json()["changed"]) == (200, changed)
        assert (await frontend.http.get(PATH)).json()["cordons"] == []


async def test_a_request_is_refused_and_explained_with_the_cordon() -> None:
    async with running_frontend(prefill_card(1), decode_card(2), script=text_answer("ok")) as frontend:
        refused = await frontend.http.post(PATH, json={"level": "worker", "name": 2})
        assert refused.status_code == 409
        assert (error_of(refused)["code"], error_of(refused)["param"]) == ("nobody_left", "force")
        forced = await frontend.http.post(PATH, json={"level": "worker", "name": 2, "force": True})
        assert forced.json()["warnings"] == ["model mock: none of its 1 decode workers takes new requests"]
        answer = await frontend.chat()
        assert answer.status_code == 503
        assert error_of(answer)["refusals"] == {"cordoned": 1}
        body = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}
        explained = (await frontend.http.post("/v1/route/explain", json=body)).json()
        (row,) = explained["decode"]["candidates"]
        assert (row["eligible"], row["reason"]) == (False, "cordoned")
        counted = (await frontend.http.get("/v1/refusals")).json()["worker_ranks"]
        assert {"reason": "cordoned", "role": "decode", "count": 1} in counted
        assert (await frontend.http.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "level"),
        ({"level": "zone"}, 400, "name"),
        ({"level": "zone", "name": ""}, 400, "name"),
        ({"level": "zone", "name": "a", "why": "x"}, 400, "why"),
        ({"level": "zone", "name": "a", "force": "yes"}, 400, "force"),
        ({"level": "zone", "name": "a", "reason": "two\nlines"}, 400, "reason"),
        ({"level": "zone", "name": "a", "by": "x" * 257}, 400, "by"),
        ({"level": "rack", "name": "a"}, 404, "level"),
        ({"level": "worker", "name": "x"}, 400, "name"),
        ({"level": "worker", "name": 9}, 404, "name"),
    ],
)
async def test_an_invalid_cordon_field_is_named(body: Mapping[str, object], status: int, param: str) -> None:
    async with running_frontend(card(1, zone="a")) as frontend:
        response = await frontend.http.post(PATH, json=body)
        assert (response.status_code, error_of(response)["param"]) == (status, param)
        assert (await frontend.http.get(PATH)).json()["cordons"] == []


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({}, 400, "level"),
        ({"level": "zone"}, 400, "name"),
        ({"level": "zone", "name": "a", "force": "1"}, 400, "force"),
        ({"level": "rack", "name": "a"}, 404, "level"),
    ],
)
async def test_a_wrong_field_of_an_uncordon_is_named(
    asked: Mapping[str, str], status: int, param: str
) -> None:
    async with running_frontend(card(1, zone="a")) as frontend:
        response = await frontend.http.delete(PATH, params=asked)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
