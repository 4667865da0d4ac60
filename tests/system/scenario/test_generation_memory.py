"""What a long answer held goes with its last user, not when Python's collector comes round."""

import gc

from kvrouter.core.requests import FinishReason
from tests.testing.router_harness import RouterHarness, card, generate_request, router_harness
from tests.testing.scripted_transport import ScriptedTransport


async def read_one(harness: RouterHarness) -> None:
    async with harness.service.requests.generate(generate_request()) as generation:
        async for _ in generation:
            pass


async def test_a_finished_answer_leaves_no_reference_cycle() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, 2, 3, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1))
    await read_one(harness)
    while gc.collect():
        pass  # finalizers of what other tests left may leave more
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await read_one(harness)
        plane.opened.clear()
        gc.collect()
        left = {
            type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("kvrouter.")
        }
        assert left == set()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
