"""The same call directly and through kvrouter, before a scripted engine that answers as vLLM does: nothing
differs but what the page *Differences* says.
"""

from pathlib import Path

from tests.differential.calls import all_calls
from tests.differential.run import Tally, both_ways

KNOWN = Path(__file__).with_name("known.txt")


async def test_nothing_differs_but_what_the_table_says() -> None:
    tally = Tally()
    async with both_ways() as ways:
        for call in all_calls():
            alone = await ways.alone(call)
            _, through = await ways.through(call)
            tally.add(call, alone, through)
    print(f"\n{tally}")
    known = set(KNOWN.read_text().splitlines())
    assert set(tally.different) <= known
