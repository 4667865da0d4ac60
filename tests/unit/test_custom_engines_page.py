"""The page on custom engines shows code that runs, calls that exist, and limits that hold."""

import re
from pathlib import Path
from textwrap import dedent

from kvrouter.worker import engine_door

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "custom-engines.md").read_text("utf-8")
HEADER = (ROOT / "native" / "c" / "include" / "kvrouter.h").read_text("utf-8")
SHOWN = {
    "c": ("examples/c/publish.c",),
    "python": ("examples/own_engine.py", "examples/c/worker.py"),
}


def holds(text: str, block: str) -> bool:
    """Whether the block stands in the text as whole lines, at any one indentation."""
    lines, wanted = text.splitlines(), block.splitlines()
    return any(
        dedent("\n".join(lines[at : at + len(wanted)])) == "\n".join(wanted) for at in range(len(lines))
    )


def test_every_block_is_part_of_an_example() -> None:
    for language, files in SHOWN.items():
        texts = [(ROOT / name).read_text("utf-8") for name in files]
        blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        assert blocks
        for block in blocks:
            assert any(holds(text, block) for text in texts), f"in no example:\n{block}"


def test_every_call_and_code_that_the_page_names_is_in_the_header() -> None:
    named = set(re.findall(r"\b(?:kvr_\w+|KVR_[A-Z_]+)\b", PAGE)) - {"KVR_TOKEN"}
    assert named
    assert {name for name in named if not re.search(rf"\b{name}\b", HEADER)} == set()


def test_the_doors_limits_are_the_pages() -> None:
    assert f"cleared after {engine_door.SILENCE_S:g} s of silence" in PAGE
    assert f"| connections | {engine_door.CONNECTIONS_MAX} at one door |" in PAGE
    assert f"| token | {engine_door.TOKEN_BYTES_MAX} bytes |" in PAGE
    assert f"| frames | {engine_door.FRAME_BYTES_MAX >> 20} MiB, 4096 blocks" in PAGE


def test_every_link_within_the_page_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
