"""The library's page shows code that runs: every block of it is part of an example."""

import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLES = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}


def holds(text: str, block: str) -> bool:
    """Whether the block stands in the text as whole lines, at any one indentation."""
    lines, wanted = text.splitlines(), block.splitlines()
    return any(
        dedent("\n".join(lines[at : at + len(wanted)])) == "\n".join(wanted) for at in range(len(lines))
    )


def test_every_block_is_part_of_an_example() -> None:
    assert BLOCKS
    for block in BLOCKS:
        assert any(holds(text, block) for text in EXAMPLES.values()), f"in no example:\n{block}"


def test_every_example_is_linked_and_shown() -> None:
    for name, text in EXAMPLES.items():
        assert f"(../examples/{name})" in PAGE
        assert any(holds(text, block) for block in BLOCKS), f"no block of {name}"


def test_every_link_within_the_page_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
