"""``kvrouter doctor`` on the command line: its exit codes, its report for people and for programs."""

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from pydantic import SecretStr
from rich.console import Console

from kvrouter.api.fleet_schema import Fleet
from kvrouter.cli import main
from kvrouter.cli.commands import kvrouter
from kvrouter.cli.doctor.diagnosis import CHECKS, examine
from kvrouter.cli.doctor.findings import Finding, Report, Severity, Unmade
from kvrouter.cli.doctor.reading import Counts, Reading
from kvrouter.cli.doctor.report import drawn
from kvrouter.engines.openai.metrics import Sample
from kvrouter.settings.tree import FrontendSettings
from tests.testing.doctor import run_doctor, url_of
from tests.testing.frontend_harness import running_frontend
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.router_harness import card


async def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, kvrouter, ["doctor", *arguments], env=env)


async def test_doctor_of_a_healthy_fleet_exits_with_0() -> None:
    async with mock_server(zoned_fleet()) as here:
        done = await run("--url", here.url)
        by_variable = await run(env={"KVROUTER_URL": here.url})
    assert (done.exit_code, by_variable.exit_code) == (0, 0)
    assert "nothing is wrong; " in done.output
    assert "\x1b" not in done.output
    assert "zones" in done.output
    assert "--recording" in done.output


async def test_doctor_problem_exits_with_1_and_names_its_remedy() -> None:
    async with mock_server(zoned_fleet()) as here:
        for worker_id in (2, 3):
            await here.kill(worker_id)
        done = await run("--url", here.url)
    assert done.exit_code == 1
    assert "1 critical; " in done.output
    assert "critical  zones  zone=a (mock)" in done.output
    for line in (
        "seen      prefill workers",
        "compared  2 domains",
        "why       a prompt",
        "remedy    start decode",
    ):
        assert line in done.output


async def test_doctor_json_report_has_every_field_and_every_check() -> None:
    async with running_frontend(card(1), card(2, draining=True)) as frontend:
        done = await run("--url", url_of(frontend), "--output", "json", "--no-engines")
    assert done.exit_code == 0, "a note is no problem"
    said: dict[str, Any] = json.loads(done.output)
    lists = {"findings", "passed", "not_made", "not_enough", "cache"}
    assert said.keys() == {"format", "url", "over_s", "hit_rate", *lists}
    assert (said["format"], said["url"], said["over_s"]) == ("kvrouter.doctor.v1", url_of(frontend), None)
    (finding,) = said["findings"]
    assert finding.keys() == {"check", "severity", "subject", "seen", "why", "remedy", "compared"}
    assert (finding["check"], finding["severity"]) == ("answering", "note")
    unmade = [*said["not_made"], *said["not_enough"]]
    assert all(each.keys() == {"check", "subject", "why"} for each in unmade)
    assert all(each.keys() == {"check", "holds", "compared"} for each in said["passed"])
    assert all(each["compared"] for each in (*said["passed"], *said["findings"]))
    assert {"engines", "replicas", "slow-ranks"} <= {each["check"] for each in said["not_made"]}
    assert {"hit-rate", "predictions"} <= {each["check"] for each in said["not_enough"]}
    made = {each["check"] for each in (*said["passed"], *unmade)}
    assert made | {"answering"} == {check.name for check in CHECKS}


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
async def test_doctor_of_an_unreachable_router_exits_with_2(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["doctor", "--url", url]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvrouter: ")


async def test_doctor_refused_for_its_admin_token_exits_with_2() -> None:
    async with running_frontend(
        card(1), settings=FrontendSettings(admin_token=SecretStr("secret"))
    ) as frontend:
        refused = await run("--url", url_of(frontend), env={"KVROUTER_ADMIN_TOKEN": "other"})
        let_in = await run("--url", url_of(frontend), env={"KVROUTER_ADMIN_TOKEN": "secret"})
    assert refused.exit_code == 2
    assert "401" in refused.output
    assert let_in.exit_code == 0


async def test_doctor_compares_the_router_with_replicas_given_by_url() -> None:
    async with running_frontend(card(1)) as one, running_frontend(card(1)) as two:
        done = await run("--url", url_of(one), "--replica", url_of(two))
    assert done.exit_code == 1
    assert "it shares nothing with 1 other router" in done.output


def test_wrong_doctor_flag_is_named_with_exit_code_2() -> None:
    for flags in (["--over-s", "0"], ["--timeout-s", "-1"], ["--output", "yaml"]):
        done = CliRunner().invoke(kvrouter, ["doctor", *flags])
        assert done.exit_code == 2
        assert flags[0] in done.output


async def test_findings_of_one_cause_are_shown_once() -> None:
    async with running_frontend(*(card(n, publishes_kv_events=False) for n in range(1, 21))) as frontend:
        report = await run_doctor(frontend)
    assert len(report.findings) == 20
    shown = text_of(report)
    assert shown.count("it publishes no KV events") == 1
    assert "also      worker 2 (both), worker 3 (both)" in shown
    assert "and 11 more" in shown
    assert "not made" in shown
    many = msgspec.structs.replace(
        report, not_made=[Unmade("engines", f"worker {n}", "gone") for n in range(20)]
    )
    shown = text_of(many)
    assert shown.count("gone") == 8
    assert "and 12 more" in shown


def text_of(report: Report) -> str:
    page = io.StringIO()
    Console(file=page, width=200, force_terminal=True, color_system=None).print(drawn(report))
    return page.getvalue()


async def test_text_of_the_fleet_is_printed_without_terminal_commands() -> None:
    async with running_frontend(card(1)) as frontend:
        report = await run_doctor(frontend)
    evil = Finding("roles", Severity.WARNING, "[red]x[/b]", "a\x1b[31mb\x07", "c\nd", "\u202ee")
    shown = text_of(msgspec.structs.replace(report, findings=[evil], url="http://[/x]"))
    assert "[red]x[/b]" in shown
    assert "http://[/x]" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "c�d" in shown


OLD = (
    '{"discovery": {"reachable": true, "why": null}, "draining": false, "workers": [],'
    ' "models": [{"model": "m", "block_size": 16, "router_mode": "kv", "router_cost": "blocks",'
    ' "links": null,'
    ' "waiting_requests": 0, "parted_pairs": [], "kv_transfer_default": null,'
    ' "active_decode_blocks_threshold": null, "active_prefill_tokens_threshold": null}]}'
)


def test_checks_without_data_from_an_older_router_are_not_passed() -> None:
    fleet = msgspec.json.decode(OLD, type=Fleet)
    report = examine(Reading(url="u", fleet=fleet, served=frozenset("m"), counts=Counts(), gauges=Counts()))
    assert {"refused-workers", "versions", "kv-events"} <= {each.check for each in report.not_made}
    assert not {"refused-workers", "versions", "kv-events"} & {each.check for each in report.passed}


def test_counts_of_a_router_that_restarted_begin_again() -> None:
    def samples(**values: float) -> dict[str, list[Sample]]:
        return {"n": [Sample({"code": code}, value) for code, value in values.items()]}

    counts = Counts(samples(a=7, b=3, c=2), samples(a=5, b=9))
    assert counts.by("n", "code") == {"b": 3, "a": 2, "c": 2}
    assert counts.total("n", code="a") == 2


def test_each_check_has_a_name_of_its_own_and_a_line_in_the_docs() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")
    table = page.partition("## The checks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == names
