"""What a page shows at a terminal: commands, and what they are shown to write."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPT = "$ "
LEFT_OUT = "…"
"""In a shown line: anything."""

_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?")
_DRAWN = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5,10}\b")
"""The ends of names that Kubernetes draws have these characters alone."""

_IDENTITY = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*")
_NUMBER = re.compile(r"\d[\w.:]*")
_KEPT = re.compile(r"\d{1,2}/\d{1,2}[,.]?|[45]\d\d")
"""Counts of workers and pods, and HTTP's errors, are the same each time; other numbers are not."""


@dataclass(frozen=True)
class Step:
    """A command of a page, with the heading that it stands under, and the lines that are shown after it."""

    line: int
    section: str
    command: str
    shown: tuple[str, ...]
    is_python: bool = False


def steps_of(path: Path) -> list[Step]:
    """Return every command of the page's ``console`` blocks, and each ``python`` block as one, in order."""
    return list(_steps(path.read_text("utf-8").splitlines()))


def absent(shown: Sequence[str], written: str) -> list[str]:
    """Return the shown lines that were not written, whatever their times, ids and counts are."""
    lines = [_masked(line) for line in written.splitlines()]
    return [line for line in shown if not any(_pattern(line).fullmatch(each) for each in lines)]


def _steps(lines: Sequence[str]) -> Iterator[Step]:
    section, language, block = "", "", list[tuple[int, str]]()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("```") and language:
            yield from _block(language, section, block)
            language = ""
        elif text.startswith("```"):
            language, block = text.removeprefix("```") or "text", []
        elif language:
            block.append((number, line))
        elif line.startswith("#"):
            section = line.lstrip("# ")


def _block(language: str, section: str, block: Sequence[tuple[int, str]]) -> Iterator[Step]:
    if language == "python":
        yield Step(block[0][0], section, "\n".join(line for _, line in block), (), is_python=True)
    if language != "console":
        return
    rest = list(block)
    while rest:
        number, line = rest.pop(0)
        words = [line.removeprefix(PROMPT)]
        document = _HERE_DOCUMENT.search(line)
        while rest and (words[-1].endswith("\\") or (document and words[-1] != document[1])):
            words.append(rest.pop(0)[1])
        shown = []
        while rest and not rest[0][1].startswith(PROMPT):
            shown.append(rest.pop(0)[1])
        yield Step(number, section, "\n".join(words), tuple(each for each in shown if each.strip()))


def _masked(line: str) -> str:
    """Without what differs each time: names that Kubernetes draws, times and counts."""
    line = _DRAWN.sub("-#", line)
    return " ".join(word if _KEPT.fullmatch(word) else _number_free(word) for word in line.split())


def _number_free(word: str) -> str:
    return _NUMBER.sub("#", _IDENTITY.sub("#", word))


def _pattern(shown: str) -> re.Pattern[str]:
    parts = [re.escape(_masked(part)) for part in shown.split(LEFT_OUT)]
    return re.compile(r"\s*.*?\s*".join(parts))
