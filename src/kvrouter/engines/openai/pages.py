"""The pages on which an engine reports its values; a missing value is unknown, and noted."""

from collections.abc import Mapping

import msgspec

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.json import decoded
from kvrouter.engines.attach import KeyRefused
from kvrouter.engines.openai.metrics import Samples, read_metrics
from kvrouter.engines.openai.server import EngineServer, PageFailed
from kvrouter.transports.requests.port import WorkerUnreachable

COUNT_MAX = 2**53
"""A larger number is no count, and would not be exact."""

MODELS = "/v1/models"
HEALTH = "/health"

OWNERS = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
"""The owners of models that engines report, which identify their kind."""

_object: "msgspec.json.Decoder[dict[str, object]]" = msgspec.json.Decoder(dict[str, object])


class ListedModel(msgspec.Struct, frozen=True):
    """An entry of ``/v1/models``; None for missing fields."""

    id: str
    root: str | None = None
    parent: str | None = None
    context_length: int | None = None
    owner: str | None = None


def text_of(value: object) -> str | None:
    """Return a text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


def count_of(value: object, *, least: int = 1) -> int | None:
    """Return a number of things, also one written as text; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(COUNT_MAX)):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < COUNT_MAX:
        return None
    return int(value) if value == int(value) else None


def object_of(value: object) -> Mapping[str, object]:
    """Return an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


class EnginePages:
    """Reads one engine's pages. :attr:`missing` lists what could not be read, and its effect."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._missing: list[str] = []

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each thing that is missing."""
        return tuple(self._missing)

    def note(self, what: str, lost: str) -> None:
        """Note a missing value, and what is ``lost`` by it."""
        self._missing.append(f"the engine at {self._server.url}: {what}: {lost}")

    async def page(self, path: str) -> bytes | str:
        """Return a page, or why it cannot be read. Raises WorkerUnreachable if the engine is not reached."""
        try:
            page = await self._server.look(path)
        except (PageFailed, KeyRefused) as error:
            return error.message
        return f"it has no {path}" if page is None else page

    async def fields(self, path: str, *, lost: str | None = None) -> Mapping[str, object]:
        """Return the object on a page, empty if it cannot be read; that is noted if anything is ``lost`` by
        it.
        """
        page = await self.page(path)
        why = page if isinstance(page, str) else ""
        if not isinstance(page, str):
            try:
                return decoded(_object, page, path)
            except ProtocolError as error:
                why = error.message
        if lost is not None:
            self.note(why, lost)
        return {}

    async def metrics(self, path: str, names: tuple[str, ...]) -> Samples | str:
        """Return the samples on a page of metrics, or why they cannot be read."""
        try:
            page = await self._server.metrics(names, path)
            return f"it has no {path}" if page is None else read_metrics(page, names)
        except (PageFailed, KeyRefused, ProtocolError) as error:
            return error.message

    async def models(self, *, owner: str, model: str | None) -> list[ListedModel]:
        """Return the models that it lists, at least one; only ``model`` if the list cannot be read.

        Raises WorkerUnreachable while it lists no model, ConfigError for a server of another owner, or if the
        list cannot be read and ``model`` is None.
        """
        page = await self._server.look(MODELS)
        is_whose = f"is it {OWNERS[owner]}'s server?"
        if page is None:
            raise ConfigError(f"{self._server.url} has no {MODELS}: {is_whose}", param="url")
        try:
            data = decoded(_object, page, MODELS).get("data")
            why = f"{MODELS} lists no model that can be read"
        except ProtocolError as error:
            data, why = None, error.message
        if data == []:
            raise WorkerUnreachable("the engine lists no model yet")
        listed = [found for each in data if (found := _listed(each))] if isinstance(data, list) else []
        for each in listed:
            if each.owner in OWNERS and each.owner != owner:
                raise ConfigError(
                    f"{self._server.url} serves a model that is owned by {each.owner!r}, not {owner!r}: "
                    f"{is_whose}",
                    param="url",
                )
        if listed:
            return listed
        if model is None:
            raise ConfigError(f"{self._server.url}: {why}: name the model that it serves", param="model")
        self.note(why, "that it serves what is asked for is believed")
        return [ListedModel(model)]


def _listed(entry: object) -> ListedModel | None:
    fields = object_of(entry)
    name = text_of(fields.get("id"))
    if name is None:
        return None
    return ListedModel(
        name,
        root=text_of(fields.get("root")),
        parent=text_of(fields.get("parent")),
        context_length=count_of(fields.get("max_model_len")),
        owner=text_of(fields.get("owned_by")),
    )


async def check_serves(server: EngineServer, model: str, *, owner: str) -> None:
    """Raise WorkerUnreachable for an engine that does not answer, or serves another model; ConfigError for
    another kind of server.
    """
    try:
        listed = await EnginePages(server).models(owner=owner, model=model)
    except PageFailed:
        if await server.look(HEALTH) is None:
            raise
        return
    if model not in {each.id for each in listed}:
        names = ", ".join(each.id for each in listed)
        raise WorkerUnreachable(f"{server.url} was started again with other models: {names}, not {model}")
