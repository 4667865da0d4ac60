"""The whole replay, from command line to table, before a server that only pretends to be a fleet."""

import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from benchmarks import replay_sample
from benchmarks.http_replay.result import Report, problems
from kvrouter.core.constraints import RouterMode

PRETENDER = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, mode, crossed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
answered = 0

def event(**fields):
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": []}
    return b"data: " + json.dumps(chunk | fields).encode() + b"\\n\\n"

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b"# TYPE kvrouter_handoffs counter\\n")
            line = 'kvrouter_handoffs_total{prefill_domain="a",decode_domain="%s"} %d\\n'
            self.wfile.write((line % ("a", answered) + line % ("b", crossed * bool(answered))).encode())
        elif self.path == "/v1/fleet":
            workers = [(1, "prefill", "a"), (2, "prefill", "b"), (3, "decode", "a"), (4, "decode", "b")]
            listed = [
                {"worker_id": number, "role": role, "domains": {"zone": zone}}
                for number, role, zone in workers
            ]
            self.wfile.write(json.dumps({"workers": listed}).encode())

    def do_POST(self):
        global answered
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answered += 1
        words = len(body["messages"][0]["content"].split())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-kvrouter-prefill-worker", "1/0")
        self.send_header("x-kvrouter-decode-worker", "3/0")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(event(choices=[{"index": 0, "delta": {"content": " a"}, "finish_reason": None}]))
        cached = {"cached_tokens": words // 4 if mode == "kv" else 0}
        self.wfile.write(event(usage={
            "prompt_tokens": words, "completion_tokens": body["max_tokens"], "total_tokens": 0,
            "prompt_tokens_details": cached,
        }))
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

ROWS = 12


def untimed_problems(report: Report) -> list[str]:
    """What is not as it must be, but for what the machine's speed decides."""
    return [each for each in problems(report) if "TTFT" not in each]


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str, crossed: int = 0) -> Result:
    def pretend(_fleet_file: Path, *, router_mode: str, port: int) -> list[str]:
        return [sys.executable, "-c", PRETENDER, str(port), router_mode, str(crossed)]

    monkeypatch.setattr(replay_sample, "up_command", pretend)
    monkeypatch.setattr(replay_sample, "problems", untimed_problems)
    scale = ["--rows", str(ROWS), "--speedup", "1000", "--json", str(output)]
    return CliRunner().invoke(replay_sample.main, [*scale, *arguments])


def test_the_replay_prints_a_table_and_writes_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "results" / "figures.json"
    result = run(monkeypatch, output, "--modes", "kv,round-robin", "--markdown")
    assert result.exit_code == 0, result.output
    assert "|  | kv | round-robin |" in result.stdout
    report = msgspec.json.decode(output.read_bytes(), type=Report)
    assert [each.mode for each in report.modes] == [RouterMode.KV, RouterMode.ROUND_ROBIN]
    for each in report.modes:
        assert (each.requests, each.errors, sum(each.handoffs.values())) == (report.rows, 0, report.rows)
        assert each.prefill_share == {"1": 1.0, "2": 0.0}
    assert 0 < report.rows <= ROWS
    assert 0.2 < report.modes[0].cached_share <= 0.25 < report.ceiling < 1


def test_a_transfer_across_zones_ends_the_replay_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run(monkeypatch, tmp_path / "figures.json", "--modes", "kv", crossed=2)
    assert result.exit_code == 1
    assert "2 transfers by the metrics and 0 by the headers crossed" in result.output.replace("\n", " ")
    assert (tmp_path / "figures.json").exists()


def test_an_invalid_fleet_file_is_reported_without_a_traceback(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("version: 2\n")
    result = CliRunner().invoke(replay_sample.main, ["--fleet", str(fleet), "--json", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "fleet.yaml:1" in result.output
    assert "Traceback" not in result.output
