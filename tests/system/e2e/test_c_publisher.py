"""An engine in C: the example is compiled, called for what to store, and moves a live decision."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.testing.c_engine import INCLUDE, ROOT, compiler, library
from tests.testing.publishing_workers import BLOCK_SIZE, PROMPT, TOKEN, PublishingWorkers, publishing_workers

EXAMPLE = ROOT / "examples" / "c" / "publish.c"
LIMIT_S = 60.0
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
BEFORE = (1, 3)
"""Worker 1 holds three of the prompt's six blocks."""


async def run(*command: str | Path) -> None:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, err.decode()


@pytest.mark.parametrize(("name", "standard"), [("cc", "c11"), ("c++", "c++17")])
async def test_the_header_compiles_without_a_warning(name: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / ("only.c" if name == "cc" else "only.cc")
    source.write_text(
        "#include <kvrouter.h>\n"
        "kvr_config config = KVR_CONFIG_INIT;\nkvr_state state = KVR_STATE_INIT;\n"
        "int main(void) { return kvr_version() == NULL || kvr_message(KVR_FULL) == NULL; }\n"
    )
    await run(
        compiler(name), f"-std={standard}", *STRICT, f"-I{INCLUDE}", "-c", source, "-o", tmp_path / "only.o"
    )


class Publish:
    """The example at work."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def hear(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)).decode().strip()

    async def warns(self) -> str:
        assert self.process.stderr is not None
        return (await asyncio.wait_for(self.process.stderr.readline(), LIMIT_S)).decode().strip()


@asynccontextmanager
async def publish(program: Path, address: str, token: str = TOKEN) -> AsyncIterator[Publish]:
    process = await asyncio.create_subprocess_exec(
        program,
        address,
        str(BLOCK_SIZE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "KVR_TOKEN": token},
    )
    try:
        yield Publish(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c") / "publish"
    built = library()
    asyncio.run(
        run(
            *(compiler("cc"), "-std=c11", *STRICT, EXAMPLE, f"-I{INCLUDE}"),
            *(built, f"-Wl,-rpath,{built.parent}", "-o", path),
        )
    )
    return path


@pytest.fixture(params=["unix", "tcp"])
async def workers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PublishingWorkers]:
    address = f"unix:{tmp_path}/door" if request.param == "unix" else "tcp://127.0.0.1:0"
    async with publishing_workers(address) as here:
        yield here


async def stores(engine: Publish, workers: PublishingWorkers) -> None:
    """Tell the program to store the prompt's blocks: from then on the prompt goes to its worker."""
    await workers.until_best(*BEFORE)
    await engine.say(" ".join(map(str, PROMPT)))
    assert await engine.hear() == "stored 6 blocks"
    await workers.until_best(2, 6)


async def test_stores_and_removals_of_a_c_engine_change_the_decision(
    program: Path, workers: PublishingWorkers
) -> None:
    async with publish(program, workers.door.address) as engine:
        await stores(engine, workers)
        await engine.say("")
        assert await engine.hear() == "removed 6 blocks"
        await workers.until_best(*BEFORE)
        await engine.say("")
        assert await asyncio.wait_for(engine.process.wait(), LIMIT_S) == 0


async def test_a_c_engine_with_a_wrong_token_reports_why_it_waits(
    program: Path, workers: PublishingWorkers
) -> None:
    async with publish(program, workers.door.address, token="a guess") as engine:
        await engine.say(" ".join(map(str, PROMPT)))
        assert "its token is not the worker's" in await engine.warns()
        assert engine.process.returncode is None


async def test_a_killed_c_engines_blocks_are_removed(program: Path, workers: PublishingWorkers) -> None:
    async with publish(program, workers.door.address) as engine:
        await stores(engine, workers)
        engine.process.kill()
        await workers.until_best(*BEFORE)


async def test_a_c_engine_reports_all_blocks_again_after_a_door_restart(
    program: Path, workers: PublishingWorkers
) -> None:
    async with publish(program, workers.door.address) as engine:
        await stores(engine, workers)
        await workers.door.stop()
        await workers.until_best(*BEFORE)
        await workers.door.start()
        await workers.until_best(2, 6)
        await engine.say("")
        assert await engine.hear() == "removed 6 blocks"
        await workers.until_best(*BEFORE)


async def test_the_example_worker_hears_the_example_engine(program: Path, tmp_path: Path) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, EXAMPLE.with_name("worker.py"), f"unix:{tmp_path}/door"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KVR_TOKEN": TOKEN},
    )
    assert worker.stdout is not None
    lines = worker.stdout

    async def says(line: str) -> bool:
        return (await asyncio.wait_for(lines.readline(), LIMIT_S)).decode().strip() == line

    try:
        assert await says(f"the door is open at unix:{tmp_path}/door")
        assert await says("worker 1 holds 0 blocks of the prompt")
        async with publish(program, f"unix:{tmp_path}/door") as engine:
            await engine.say(" ".join(map(str, range(100))))
            assert await says("worker 1 holds 6 blocks of the prompt")
        assert await says("worker 1 holds 0 blocks of the prompt")
    finally:
        worker.kill()
        await worker.communicate()
