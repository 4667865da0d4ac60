"""Ten replays whose figures stay: what each is asked, and what it comes to.

``python -m tests.testing.golden_replays`` writes them all again.
"""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from pathlib import Path

from kvrouter.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "replays"
DIGITS = 9
"""Significant digits of a figure. The last bits of a logarithm differ between processors."""
LONG = 20
"""A list of more values is written as its hash: a hundred quantiles of each time."""

_SAMPLE = "data/mooncake-conversation-sample.jsonl"
_TRAFFIC = "tests/data/replays/traffic.yaml"
_PRICES = ("--fleet", "tests/data/replays/prices.yaml")
_HAPPENINGS = ("--events", "tests/data/replays/happenings.yaml")
_RULES = (
    "kvrouter,round-robin,random,least-loaded,power-of-two,dynamo,lmetric,predicted-ttft,llm-d,aibrix,sglang,"
    "sticky"
)
_SESSIONS = ("data/agentic-coding-sessions.jsonl.gz", "--rows", "150")

REPLAYS: dict[str, tuple[str, ...]] = {
    "pairs-in-their-zone": (_SAMPLE, "--fleet", "examples/fleet.yaml"),
    "pairs-enforcement": (
        _TRAFFIC,
        *_PRICES,
        "--sweep",
        "kv_transfer.enforcement=required,fallback,preferred",
        "--speedup",
        "3",
    ),
    "pairs-joint": (
        _TRAFFIC,
        *_PRICES,
        *("--sweep", "router.router_pd_selection=sequential,joint", "--policy", "kvrouter:router_cost=time"),
    ),
    "pairs-events": (_TRAFFIC, *_PRICES, *_HAPPENINGS, "--seeds", "2"),
    "pairs-rules": (_TRAFFIC, *_PRICES, *_HAPPENINGS, "--compare", _RULES),
    "rules": (_SAMPLE, "--compare", _RULES, "--speedup", "20", "--seed", "3"),
    "costs": (_TRAFFIC, "--sweep", "router.router_cost=blocks,time,lmetric", "--speedup", "4"),
    "temperature": (
        _TRAFFIC,
        *("--policy", "kvrouter:router_temperature=0.5", "--policy", "kvrouter:router_mode=random"),
        *("--seeds", "2"),
    ),
    "sessions": (*_SESSIONS, "--dispatch", "closed", "--sweep", "router.router_cost=blocks,time"),
    "tuned": (_TRAFFIC, "--tune", "--compare", "kvrouter,dynamo,llm-d,lmetric"),
}
"""The arguments of ``kvrouter replay``, from the root of the project."""


def figures_of(name: str) -> str:
    """Return what a replay prints as JSON, with ``DIGITS`` digits a figure. Runs in the project's root.

    Raises ValueError with what it writes when it fails.
    """
    printed, written = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(written):
        code = main(["replay", *REPLAYS[name], "--output", "json"])
    if code:
        raise ValueError(f"replay {name}: exit code {code}: {written.getvalue()}")
    result = json.loads(printed.getvalue(), parse_float=lambda figure: float(f"{float(figure):.{DIGITS}g}"))
    del result["version"]
    return "\n".join(_rows(result)) + "\n"


def _rows(value: object, at: str = "") -> list[str]:
    """Return a row of text for each value: where it stands and what it is. A long list becomes its hash."""
    if isinstance(value, list) and len(value) > LONG:
        return [f"{at}: {len(value)} values, {sha256(json.dumps(value).encode()).hexdigest()[:16]}"]
    if isinstance(value, dict) and value:
        return [row for key, each in value.items() for row in _rows(each, f"{at}.{key}" if at else key)]
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [row for number, each in enumerate(value) for row in _rows(each, f"{at}[{number}]")]
    return [f"{at}: {json.dumps(value)}"]


if __name__ == "__main__":
    for each in REPLAYS:
        (FOLDER / f"{each}.txt").write_text(figures_of(each), encoding="utf-8")
