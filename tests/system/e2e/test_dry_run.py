"""A dry run of ``required`` over what a router recorded under ``preferred``, and that router under it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrouter.cli import main
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.settings.recording_settings import RecordingSettings
from tests.testing.mock_fleet import revive, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, word_ids
from tests.testing.waits import until

FROM_A: Mapping[str, Any] = {"prefill_worker_id": 1}
FROM_B: Mapping[str, Any] = {"prefill_worker_id": 4}
IN_B: Mapping[str, Any] = {"routing_constraints": {"required_taints": ["dynamo.topology/zone=b"]}}
ASKED: Sequence[Mapping[str, Any]] = ({}, FROM_A, FROM_B, IN_B)
"""What requests of each phase ask of routing: nothing, the prefill worker of a zone, a zone for both legs."""


async def statuses(here: MockServer) -> list[int]:
    """Send the same requests before, while and after zone b has no decode worker; return what came."""
    found: list[int] = []

    async def phase() -> None:
        for number, nvext in enumerate(ASKED):
            response = await here.http.post(
                "/v1/completions",
                json={
                    "model": MODEL, "prompt": word_ids(first=len(found) + number, n=64), "max_tokens": 4,
                    "nvext": nvext,
                },
            )  # fmt: skip
            found.append(response.status_code)

    fleet = here.system.fleet
    known = here.system.service.model(ModelName(MODEL)).fleet
    await phase()
    old = fleet.workers[WorkerId(5)]
    for worker_id in (5, 6):
        await here.kill(worker_id)
    await until(lambda: known.card(WorkerId(5)) is None and known.card(WorkerId(6)) is None)
    await phase()
    await revive(fleet, old)
    await until(lambda: known.card(WorkerId(5)) is not None)
    await phase()
    return found


async def test_the_dry_run_refuses_the_requests_that_required_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mock_server(
        zoned_fleet(enforcement="preferred"), recording=RecordingSettings(folder=str(tmp_path))
    ) as here:
        under_preferred = await statuses(here)
    async with mock_server(zoned_fleet(enforcement="required")) as here:
        under_required = await statuses(here)
    # in the middle phase: zone b prefills and its KV goes to zone a; who asks for zone b alone is refused
    assert under_preferred == [200] * 4 + [200, 200, 200, 503] + [200] * 4
    assert under_required == [200] * 4 + [200, 200, 503, 503] + [200] * 4

    asked = ["dry-run", str(tmp_path), "--kv-transfer-domain", "zone", "--output", "json"]
    capsys.readouterr()
    assert main(asked) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in report["refused"]] == [6]
    assert report["counts"]["refused"] == report["counts"]["refused_then"] == 1
    assert report["counts"]["not_placed_then"] == 0
    assert report["counts"]["unchanged"] + report["counts"]["moved"] == 10
    assert report["by_prefill_domain"] == {"b": 1}
    assert report["lacks"] == [{"value": "b", "role": "decode", "requests": 1}]
    (group,) = report["groups"]
    assert (group["code"], group["role"], group["domain"]) == ("no_eligible_worker", "decode", "zone")
    assert "KV keeps to zone b" in group["message"]
    assert [each["refused"] for each in report["minutes"]] == [1]
    assert (report["if_patient"]["refused"], report["if_patient"]["waited"]) == (0, 2)

    assert main([*asked, "--fail-if-refused"]) == 1
    capsys.readouterr()
    assert main([*asked, "--kv-transfer-enforcement", "fallback", "--fail-if-refused"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert (counts["refused"], counts["crosses"], counts["refused_then"]) == (0, 1, 1)
    assert main([*asked, "--router-domain-wait", "60"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["counts"]["refused"], report["waited"]) == (0, 2)  # both for zone b
    assert main(asked[:-2]) == 0
    shown = capsys.readouterr().out
    assert "1 refused while zone b had no decode worker" in shown
    assert "placed nowhere then either" in shown
    assert "no request would have been refused" in shown

    assert main([*asked, "--router-domain-wait", "nan"]) == 2
    assert "router-domain-wait: nan" in capsys.readouterr().err
    assert main(["dry-run", str(tmp_path), "--kv-transfer-domain", "rack"]) == 2
    assert "recorded: zone" in capsys.readouterr().err
