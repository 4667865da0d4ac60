"""The sessions that policies are compared on: chosen by length, and as they were published."""

import gzip
import json
from pathlib import Path

from click.testing import CliRunner

from kvrouter.sim.traces.read import open_trace
from scripts.select_sessions import CONTEXT_TOKENS, SELECTION, main, packed, select


def session(name: str, *requests: dict[str, object]) -> bytes:
    return json.dumps({"id": name, "block_size": 64, "requests": requests}).encode() + b"\n"


def request(tokens: int, answer: int = 1) -> dict[str, object]:
    return {"t": 0.0, "in": tokens, "out": answer}


def test_sessions_with_a_too_long_request_are_left_out() -> None:
    short = session("short", request(10), request(CONTEXT_TOKENS - 1))
    long = session("long", request(10), request(CONTEXT_TOKENS))
    inside = session("inside", request(10), {"t": 1.0, "requests": [request(1, CONTEXT_TOKENS)]})
    nested = session("nested", request(10), {"t": 1.0, "requests": [request(10), request(20)]})
    assert select([short, long, inside, nested]) == ([short, nested], 5)


def test_the_same_lines_give_the_same_file(tmp_path: Path) -> None:
    lines = [session("a", request(10)), session("b", request(CONTEXT_TOKENS + 1))]
    (tmp_path / "all.gz").write_bytes(gzip.compress(b"".join(lines)))
    out = tmp_path / "out.gz"
    ran = CliRunner().invoke(main, [str(tmp_path / "all.gz"), "--output", str(out)])
    assert ran.output.startswith("1 sessions, 1 requests, ")
    assert out.read_bytes() == packed(lines[:1])
    assert gzip.decompress(out.read_bytes()) == lines[0]


def test_the_selection_matches_its_page() -> None:
    trace = open_trace(SELECTION)
    rows = list(trace)
    page = (SELECTION.parent / "README.md").read_text("utf-8")
    of_agents = sum("/" in row.session for row in rows)
    sessions = {row.session.split("/")[0] for row in rows}
    assert f"{len(sessions)} sessions of people" in page
    assert f"{len(rows):,} requests, {of_agents} of them by sub-agents" in page
    assert f"{sum(row.input_tokens for row in rows) / len(rows):,.0f} tokens, the mean answer" in page
    assert max(row.input_tokens + row.output_tokens for row in rows) <= CONTEXT_TOKENS
    assert SELECTION.stat().st_size < 1 << 20
