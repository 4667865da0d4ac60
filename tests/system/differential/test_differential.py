"""The same call directly and through kvrouter, before a scripted engine that answers as vLLM does: nothing
differs but what the page *Differences* says.
"""

from tests.system.differential.calls import all_calls
from tests.system.differential.differences import DIFFERENCES
from tests.system.differential.run import Tally, both_ways


async def test_answers_through_kvrouter_differ_only_as_the_table_lists() -> None:
    tally = Tally()
    async with both_ways() as ways:
        for call in all_calls():
            alone = await ways.alone(call)
            _, through = await ways.through(call)
            tally.add(call, alone, through)
    print(f"\n{tally}")
    assert not tally.different
    unused = [row for row in DIFFERENCES if row not in tally.rows]
    assert not unused, "rows that no call shows"
