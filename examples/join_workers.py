"""Join workers that run as processes of their own: find them, route to them, see what they have cached."""

import asyncio
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

from kvrouter import KvRouter, PlaneSettings, Runtime, Settings

PROMPT = list(range(256, 256 + 640))


async def start_worker(directory: Path) -> Process:
    """Run a mock engine and its worker; in a fleet, such workers run already."""
    command = ("-m", "kvrouter.cli", "worker", "mock", "--discovery", "file")
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, "--discovery-dir", str(directory), stderr=DEVNULL
    )


async def main() -> None:
    """Send a prompt until its blocks are known to be cached somewhere."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "workers"
        processes = [await start_worker(directory) for _ in range(2)]
        try:
            await send(directory)
        finally:
            for process in processes:
                process.terminate()
                await process.wait()


async def send(directory: Path) -> None:
    """Be a router of these workers, as ``kvrouter frontend --discovery file`` would be."""
    planes = PlaneSettings.model_validate({"discovery": "file", "discovery_dir": directory})
    async with Runtime.connect(Settings(planes=planes)) as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        client = await endpoint.client()
        await client.wait_for_instances()
        client.close()
        async with KvRouter(endpoint, block_size=64) as router:
            blocks = 0
            while not blocks:  # KV events travel on their own
                answer = await router.generate(PROMPT, stop_conditions={"max_tokens": 16})
                tokens = [token async for piece in answer for token in piece["token_ids"]]
                worker_id, _, blocks = await router.best_worker(PROMPT)
            print(
                f"{len(tokens)} tokens; next time to {worker_id}, which holds {blocks} blocks of the prompt"
            )


if __name__ == "__main__":
    asyncio.run(main())
