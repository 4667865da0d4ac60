"""The programs in ``examples/``, run as their readers run them."""

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

TWO_SERVERS = "two_vllm_servers"
"""The example that is given the URLs of two vLLM servers."""

TURN = re.compile(r"worker (\d+), (\d+) blocks of the prompt are there:((?: \d+)+)")


async def output_of_example(name: str, *arguments: str) -> str:
    """Run an example; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / f"{name}.py"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def check_two_servers(urls: Sequence[str], *, model: str, block_size: int) -> None:
    """Run :data:`TWO_SERVERS` before servers that have nothing of its prompt cached, 256 tokens: the second
    turn goes where the first one went, and all blocks of the prompt are there.
    """
    *attached, first, second = (await output_of_example(TWO_SERVERS, *urls)).splitlines()
    assert attached == [
        f"worker {number}: {model} at {url}, blocks of {block_size} tokens"
        for number, url in enumerate(urls, 1)
    ]
    turns = [TURN.fullmatch(line) for line in (first, second)]
    assert all(turns), (first, second)
    (one, n_one, _), (two, n_two, tokens) = (turn.groups() for turn in turns if turn is not None)
    assert (n_one, two, n_two) == ("0", one, str(256 // block_size))
    assert 1 <= len(tokens.split()) <= 16
