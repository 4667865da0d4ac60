"""Attaches a toy: a server that says what it is at ``/toy``, and answers no call."""

import msgspec

from kvrouter.core.requests import EngineRequest
from kvrouter.engines.attach import Attached, AttachSpec, check_block_size, check_identity, check_model
from kvrouter.engines.openai.engine import EngineCall, Probe, ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer, attach_server
from kvrouter.engines.vllm.events import decode
from kvrouter.transports.requests.port import EngineFailed, WorkerUnreachable


class ToyInfo(msgspec.Struct, frozen=True):
    """What a toy says of itself."""

    model: str
    block_size: int
    ranks: int


async def ask_info(server: EngineServer) -> ToyInfo:
    """Ask what it is."""
    page = await server.look("/toy")
    if page is None:
        raise WorkerUnreachable(f"{server.url} is no toy")
    return msgspec.json.decode(page, type=ToyInfo)


class ToyClient:
    """A toy that was started as another one does not answer, so far as its worker's card goes."""

    def __init__(self, info: ToyInfo) -> None:
        self._info = info

    def call_of(self, request: EngineRequest) -> EngineCall:
        """A toy has no answers."""
        raise EngineFailed(f"the toy does not answer {request.request_id}")

    async def look(self, server: EngineServer) -> Probe:
        """Ask whether it is the same one."""
        now = await ask_info(server)
        check_identity(server.url, {"info": now}, {"info": self._info})
        return Probe(())


async def attach(spec: AttachSpec) -> Attached:
    """An :data:`~kvrouter.engines.attach.AttachEngine`."""
    return await attach_server(spec, _attach)


async def _attach(server: EngineServer, spec: AttachSpec) -> Attached:
    info = await ask_info(server)
    check_block_size(spec, info.block_size, "--toy-blocks")
    return Attached(
        engine=ServedEngine(server, ToyClient(info), ZmqEvents({}, decode, info.block_size)),
        version="toy 1",
        model=check_model(spec, (info.model,)),
        tokenizer="toy",
        context_length=2048,
        block_size=info.block_size,
        total_kv_blocks=None,
        dp_size=info.ranks,
        publishes_kv_events=False,
        warnings=(),
    )
