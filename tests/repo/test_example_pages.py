"""Pages that show code show code that runs: each of their blocks is part of an example."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
SHOWN = (
    ("library.md", "python", tuple(f"examples/{name}" for name in EXAMPLES)),
    ("custom-engines.md", "python", ("examples/own_engine.py", "examples/c/worker.py")),
    ("custom-engines.md", "c", ("examples/c/publish.c",)),
)
"""Each page's language, and the examples that its blocks are parts of."""


def page_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page_of(page), re.MULTILINE | re.DOTALL)


def holds(text: str, block: str) -> bool:
    """Whether the block stands in the text as whole lines, at any one indentation."""
    lines, wanted = text.splitlines(), block.splitlines()
    return any(
        dedent("\n".join(lines[at : at + len(wanted)])) == "\n".join(wanted) for at in range(len(lines))
    )


@pytest.mark.parametrize(("page", "language", "files"), SHOWN)
def test_every_block_is_part_of_an_example(page: str, language: str, files: tuple[str, ...]) -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in files]
    blocks = blocks_of(page, language)
    assert blocks
    for block in blocks:
        assert any(holds(text, block) for text in texts), f"in no example:\n{block}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_linked_and_shown(name: str) -> None:
    assert f"(../examples/{name})" in page_of("library.md")
    assert any(holds(EXAMPLES[name], block) for block in blocks_of("library.md", "python"))


@pytest.mark.parametrize("page", sorted({page for page, _, _ in SHOWN}))
def test_every_link_within_a_page_leads_to_a_heading(page: str) -> None:
    text = page_of(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
