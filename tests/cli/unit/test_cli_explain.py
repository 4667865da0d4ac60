"""``kvrouter explain`` against a server on loopback."""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from rich.console import Console

from kvrouter.api.decision_schema import Candidate, Explanation, Leg, RankId, Refusal
from kvrouter.cli import main
from kvrouter.cli.explain.report import draw


def row(
    worker: int, cost: float | None, *, chosen: bool = False, reason: str | None = None
) -> dict[str, object]:
    return {
        "worker_id": worker,
        "dp_rank": 0,
        "eligible": reason is None,
        "reason": reason,
        "domains": {"zone": "a"},
        "overlap_blocks": 2,
        "prefill_blocks": 8.0,
        "decode_blocks": 10.0,
        "transfer_blocks": 0.125,
        "multiplier": 1.0,
        "cost": cost,
        "chosen": chosen,
    }


ANSWER: dict[str, object] = {
    "request_id": "r1",
    "model": "mock",
    "mode": "kv",
    "isl_tokens": 640,
    "blocks": 10,
    "prefill": {"chosen": {"worker_id": 1, "dp_rank": 0}, "candidates": [row(1, 8.0, chosen=True)]},
    "decode": {
        "chosen": {"worker_id": 3, "dp_rank": 0},
        "candidates": [row(2, 18.0), row(4, None, reason="domain_mismatch"), row(3, 10.0, chosen=True)],
    },
    "constraint": {"enforcement": "required", "domain": "zone", "value": "a"},
    "fallback_used": False,
    "error": None,
}


class Router(http.server.BaseHTTPRequestHandler):
    """Answers like a router, and notes what it was asked."""

    asked: ClassVar[list[tuple[str, str | None, Any]]] = []
    models: ClassVar[list[str]] = ["mock"]
    status: ClassVar[int] = 200
    answer: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": name} for name in self.models]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body))
        self._send(self.status, self.answer)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("KVROUTER_ADMIN_TOKEN", raising=False)
    Router.asked, Router.models = [], ["mock"]
    Router.status, Router.answer = 200, json.dumps(ANSWER).encode()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_tables_show_costs_reasons_and_the_choice(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "hello [bold]", "--url", url]) == 0
    out = capsys.readouterr().out
    chat = [{"role": "user", "content": "hello [bold]"}]
    assert Router.asked == [("/v1/route/explain", None, {"model": "mock", "messages": chat})]
    assert "mock, 640 tokens, 10 blocks, mode kv" in out
    assert "Prefill: 1/0" in out
    assert "Decode: 3/0" in out
    lines = [line for line in out.splitlines() if "/0" in line and "│" in line]
    assert [line.replace("│", "").split()[0] for line in lines] == ["→", "→", "2/0", "4/0"]
    assert "chosen" in lines[1]
    assert "18" in lines[2]
    assert "domain_mismatch" in lines[3]
    assert "KV transfer: required zone=a" in out
    assert "\x1b" not in out


def test_completion_prompt_is_sent_without_a_chat(url: str) -> None:
    assert main(["explain", "--completion", "hello", "--url", url, "--model", "mock"]) == 0
    assert Router.asked == [("/v1/route/explain", None, {"model": "mock", "prompt": "hello"})]


def test_explain_json_output_is_the_routers_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "hi", "--url", url, "--model", "mock", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_the_admin_token_comes_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_ADMIN_TOKEN", "sesame")
    assert main(["explain", "hi", "--url", url]) == 0
    assert Router.asked[0][1] == "Bearer sesame"


def test_router_refusal_is_reported_in_its_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Router.status, Router.answer = 404, b'{"error": {"message": "no model \'x\'", "code": "model_not_found"}}'
    assert main(["explain", "hi", "--url", url, "--model", "x"]) == 1
    assert capsys.readouterr().err == f"kvrouter: {url}: 404 no model 'x'\n"
    Router.status, Router.answer = 500, b"<html>"
    assert main(["explain", "hi", "--url", url, "--model", "x"]) == 1
    assert capsys.readouterr().err == f"kvrouter: {url}: 500 Internal Server Error\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--url", "127.0.0.1:8000"], "--url: must be http://host:port"),
        (["--url", "http://x:99999"], "--url: must be http://host:port"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1: no answer: "),
    ],
)
def test_unreachable_router_is_reported_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "hi", "--model", "m", *arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"kvrouter: {line}")
    assert err.count("\n") == 1


def test_foreign_answer_and_ambiguous_model_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Router.answer = b'{"hello": 1}'
    assert main(["explain", "hi", "--url", url]) == 1
    assert "the answer is not a router's" in capsys.readouterr().err
    Router.models = ["a", "b"]
    assert main(["explain", "hi", "--url", url]) == 1
    assert capsys.readouterr().err == "kvrouter: --model: is required: the router serves a, b\n"
    assert main(["explain", "\udcff", "--url", url, "--model", "a"]) == 1
    assert capsys.readouterr().err == "kvrouter: PROMPT: must be UTF-8 text\n"


def test_a_refusal_has_its_error_first_then_the_table_of_each_leg(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {
        "prefill": {"chosen": None, "candidates": [row(2, 9.0, reason="busy"), row(1, 8.0)]},
        "decode": {"chosen": None, "candidates": [row(3, 77.5, reason="domain_mismatch")]},
        "constraint": None,
        "error": {
            "code": "no_eligible_worker",
            "message": "no decode worker may take this request (of 1 decode ranks: 1 domain_mismatch)",
            "refusals": {"domain_mismatch": 1},
        },
    }
    Router.answer = json.dumps(ANSWER | refusal).encode()
    assert main(["explain", "hi", "--url", url]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "no_eligible_worker: no decode worker may take this request (of 1 decode ranks: 1 domain_mismatch)"
    )
    assert second == "mock, 640 tokens, 10 blocks, mode kv"
    assert rest[0].strip() == "Prefill: nobody, 1 of 2 eligible"
    assert "Decode: nobody, 0 of 1 eligible" in map(str.strip, rest)
    lines = [line.replace("│", "").split() for line in rest if "/0" in line and "│" in line]
    assert [line[0] for line in lines] == ["1/0", "2/0", "3/0"]
    assert [line[-1] for line in lines] == ["8", "busy", "domain_mismatch"]
    assert "77.5" in lines[2]


def test_large_fleet_is_cut_with_counts_and_a_refusal_is_highlighted() -> None:
    rows = [
        Candidate(
            worker_id=number,
            dp_rank=0,
            eligible=number < 60,
            reason=None if number < 60 else "busy",
            domains={},
            overlap_blocks=0,
            prefill_blocks=1.0,
            decode_blocks=1.0,
            transfer_blocks=0.0,
            multiplier=1.0,
            cost=float(number),
            chosen=number == 5,
        )
        for number in range(100)
    ]
    explanation = Explanation(
        request_id="r",
        model="m",
        mode="kv",
        isl_tokens=1,
        blocks=0,
        prefill=None,
        decode=Leg(chosen=RankId(worker_id=5, dp_rank=0), candidates=rows),
        constraint=None,
        fallback_used=True,
        last_resort=True,
        error=Refusal(code="no_eligible_worker", message="nobody in zone=c"),
    )
    stream = io.StringIO()
    draw(explanation, Console(file=stream, width=140, force_terminal=True, color_system="standard"))
    out = stream.getvalue()
    assert "Worker: 5/0" in out
    assert "… and 50 more: busy 40, eligible 10" in out
    assert "crosses its domain" in out
    assert "failed again and again" in out
    assert out.startswith("\x1b[1;31mno_eligible_worker: nobody in zone=c\x1b[0m\n")
    assert "\x1b[1;32m" in out


def test_times_follow_the_blocks_in_the_table_where_present(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"queue_ms": 1.25, "prefill_ms": 30.0, "memory_ms": 0.0, "transfer_ms": 2.0}
    others = {"decode_ms": 4.0, "others_ms": 1.0, "turnover_ms": -0.5}
    timed = {**row(1, 0.038, chosen=True), "times": {"expected_ms": 33.25, **parts, **others}}
    prefill = {"chosen": {"worker_id": 1, "dp_rank": 0}, "candidates": [timed]}
    Router.answer = json.dumps({**ANSWER, "prefill": prefill}).encode()
    assert main(["explain", "hello", "--url", url]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "33.2" in line)
    assert [cell for cell in line.replace("│", " ").split() if "." in cell][-5:] == [
        "1.2", "30.0", "2.0", "33.2", "4.5",
    ]  # fmt: skip
    assert "38" in line
    named, units, *_ = ([cell.strip() for cell in row.split("┃")] for row in out.splitlines() if "┃" in row)
    assert (
        dict(zip(named, units, strict=True)).items()
        > {
            "overlap": "blocks",
            "cost": "ms",
            "queue": "ms",
            "transfer": "ms",
            "= TTFT": "ms",
            "for others": "ms",
        }.items()
    )
    assert "memory" not in named, "it is 0 for all"


def test_legend_says_once_what_each_shown_column_means(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "hello", "--url", url]) == 0
    legend = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines() if ": " in line]
    in_blocks = ["overlap blocks", "prefill blocks", "decode blocks", "transfer blocks", "×", "cost"]
    assert [name for name in legend if name in in_blocks] == in_blocks
    assert not any("ms" in name for name in legend)


def test_ids_and_reasons_are_never_cut(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = dict.fromkeys(
        ("queue_ms", "prefill_ms", "memory_ms", "transfer_ms", "decode_ms", "others_ms"), 1.5
    )
    times = {"expected_ms": 6.0, "turnover_ms": 0.5, **parts}
    candidates = [
        {**row(2**53 - 1, 0.038, chosen=True), "times": times},
        {**row(2**53 - 2, 0.039), "times": times, "eligible": False, "reason": "prompt_out_of_range"},
    ]
    prefill = {"chosen": {"worker_id": 2**53 - 1, "dp_rank": 0}, "candidates": candidates}
    Router.answer = json.dumps({**ANSWER, "prefill": prefill}).encode()
    assert main(["explain", "hello", "--url", url]) == 0
    out = capsys.readouterr().out
    assert f"{2**53 - 2}/0" in out
    assert "prompt_out_of_range" in out
