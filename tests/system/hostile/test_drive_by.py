"""A web page of another origin, in the browser of somebody who reaches a router without an admin token."""

import json

import httpx

from kvrouter.core.requests import CallRoute
from tests.testing.mock_server import words
from tests.testing.processes import Frontend, eventually, fleet

DRIVE_BY = {
    "origin": "http://evil.example",
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "no-cors",
    "content-type": "text/plain;charset=UTF-8",
}
"""What a browser sends for a page without asking the router first."""

REBOUND = {
    "host": "rebind.evil.example:8000",
    "origin": "http://rebind.evil.example:8000",
    "sec-fetch-site": "same-origin",
    "content-type": "application/json",
}
"""What it sends for a page whose name leads to 127.0.0.1 by now."""

CALL = {"model": "mock", "prompt": words(n=8), "max_tokens": 1}


async def test_pages_of_another_origin_cannot_change_or_see_the_fleet() -> None:
    async with fleet() as here:
        await here.worker()
        frontend = await here.frontend()
        await eventually(lambda: frontend.serves(1))
        [worker] = (await frontend.fleet())["workers"]
        cordon = {"level": "worker", "name": worker["worker_id"], "force": True}
        thresholds = {"model": "mock", "active_decode_blocks_threshold": 0.0}
        for sent in (DRIVE_BY, REBOUND):
            for path, body in (("/v1/cordons", cordon), ("/busy_threshold", thresholds)):
                answer = await frontend.http.post(path, content=json.dumps(body), headers=sent)
                assert answer.status_code == 403, answer.text
            for path in ("/v1/fleet", "/v1/decisions", "/metrics"):
                answer = await frontend.http.get(path, headers=sent)
                assert (answer.status_code, "worker_id" in answer.text) == (403, False), answer.text
        for kind in ("text/plain", "multipart/form-data"):
            sent = {**DRIVE_BY, "content-type": kind}
            call = await frontend.http.post("/v1/completions", content=json.dumps(CALL), headers=sent)
            assert call.status_code == 403
        await others_go_on(frontend)


async def others_go_on(frontend: Frontend) -> None:
    """A client, a probe and a scraper, also by the name of an ingress, and nothing is cordoned."""
    ingress = {"host": "api.example.com"}
    served: list[httpx.Response] = [
        await frontend.http.post(CallRoute.COMPLETION, json=CALL),
        await frontend.http.post(CallRoute.COMPLETION, json=CALL, headers=ingress),
        await frontend.http.get("/ready", headers=ingress),
        await frontend.http.get("/metrics"),
        await frontend.http.get("/v1/cordons"),
    ]
    assert [answer.status_code for answer in served] == [200] * len(served)
    assert served[-1].json()["cordons"] == []
