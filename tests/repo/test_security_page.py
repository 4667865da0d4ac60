"""The page on security names every limit that a setting has, with the default in code."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from kvrouter.settings.planes import KUBERNETES_LEASE_S, LEASE_S
from kvrouter.settings.setting_spec import SettingSpec
from kvrouter.settings.tree import SETTINGS
from kvrouter.text.tokenizer import FAST, SLOW

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
LIMIT = re.compile(r"_(max|min|limit|timeout|within|stall|water|overflow)(_|$)|_wait_s$")
NO_LIMIT = {"router_min_initial_workers", "circuit_open_max_s"}
"""Settings whose names look like it."""

UNSET = {
    "--connections-max": "16,384, fewer where `ulimit -n` is lower",
    "--body-max-bytes": "what the longest context here can need, at most 64 MiB",
    "--body-max-token-ids": "the longest context",
    "--tokenize-inline-max-chars": (
        f"{FAST.off_loop_chars:,} characters with a fast encoder, else {SLOW.off_loop_chars:,}"
    ),
    "--token-max-chars": "context length × the longest token",
    "--ttft-timeout-s": "none",
    "--lease-s": f"{LEASE_S:g} s, {KUBERNETES_LEASE_S:g} s on Kubernetes",
}
"""What the page says of settings that are unset by default."""


class Row(NamedTuple):
    """A line of one of the page's tables of limits."""

    what: str
    default: str
    flags: tuple[str, ...]
    when_full: str


def rows() -> list[Row]:
    found = []
    for line in PAGE[PAGE.index("## Limits of the frontend") :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "what" or cells[0].startswith("---"):
            continue
        *first, last = cells
        settings = first[2] if len(first) > 2 and not first[2].startswith("follows") else ""
        found.append(Row(first[0], first[1], tuple(re.findall(r"`(--[\w-]+)`", settings)), last))
    return found


ROWS = rows()
BY_FLAG: dict[str, SettingSpec] = {spec.flag: spec for spec in SETTINGS if spec.flag is not None}


def text_of(spec: SettingSpec) -> str:
    """The default as the page writes it."""
    default = spec.default
    if default is None:
        return UNSET[str(spec.flag)]
    assert isinstance(default, int | float)
    if spec.unit == "seconds":
        return f"{default:g} s"
    if spec.unit in ("bytes", "bytes per second"):
        power, name = (20, "MiB") if default >= 1 << 20 else (10, "KiB")
        return f"{int(default) >> power} {name}{'/s' if spec.unit != 'bytes' else ''}"
    return f"{default:,}"


def says(words: str, text: str) -> bool:
    """Whether ``text`` stands in ``words``, and not as a part of another number."""
    return re.search(rf"(?<![\d,.]){re.escape(text)}(?![\d]|[,.]\d| ?[KMG]iB|/s)", words) is not None


def limits() -> list[str]:
    specs = [spec for spec in SETTINGS if LIMIT.search(spec.name) and spec.name not in NO_LIMIT]
    return sorted(str(spec.flag or spec.variable) for spec in specs)


@pytest.mark.parametrize("setting", limits())
def test_every_limit_setting_is_on_the_security_page(setting: str) -> None:
    assert setting in {flag for row in ROWS for flag in row.flags}


@pytest.mark.parametrize("row", [row for row in ROWS if row.flags], ids=lambda row: row.what)
def test_defaults_on_the_page_equal_those_in_code(row: Row) -> None:
    """In the order of the settings, where there is one word for each."""
    texts = [text_of(BY_FLAG[flag]) for flag in row.flags]
    parts = re.split(r", |; ", row.default)
    if len(parts) == len(texts) > 1:
        for text, part in zip(texts, parts, strict=True):
            assert says(part, text)
    else:
        for text in texts:
            assert says(row.default, text) or says(row.when_full, text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_every_limit_on_the_page_has_its_meaning_and_effect(row: Row) -> None:
    assert all((row.what, row.default, row.when_full))
