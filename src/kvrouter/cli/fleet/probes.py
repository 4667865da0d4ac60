"""What the engines at some URLs say of themselves, for a fleet file to begin with."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvrouter.app.attach.attachment import NotAnswered, probe
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.secret import secret_variable
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE


class EngineAnswer(NamedTuple):
    """The answer of the engine at ``url``; ``attached`` is None where it does not answer, for ``why``."""

    url: str
    attached: Attached | None
    why: str = ""

    @property
    def lines(self) -> list[str]:
        """The answer in words: what the engine is, and its warnings."""
        found = self.attached
        if found is None:
            return [f"{self.url}: does not answer now ({self.why}): it is asked when the fleet is run"]
        events = "KV events" if found.publishes_kv_events else "no KV events"
        size = f"blocks of {found.block_size or 'unknown'} tokens"
        first = f"{self.url}: {found.version} serves {found.model}: {size}, {events}"
        return [first, *(f"warning: {warning}" for warning in found.warnings)]


def ask_engines(kind: str, urls: Sequence[str], environ: Mapping[str, str]) -> tuple[EngineAnswer, ...]:
    """Ask all engines at once, with their key of ``environ``. Raises ConfigError for a server of another
    kind, and for one that asks for a key.
    """
    key = secret_variable(environ, ENGINE_KEY_VARIABLE)
    specs = [AttachSpec(kind=kind, url=url, worker_id=WorkerId(0), api_key=key) for url in urls]
    return asyncio.run(_asked(specs))


async def _asked(specs: Sequence[AttachSpec]) -> tuple[EngineAnswer, ...]:
    return tuple(await asyncio.gather(*map(_answer, specs)))


async def _answer(spec: AttachSpec) -> EngineAnswer:
    try:
        return EngineAnswer(spec.url, await probe(spec))
    except NotAnswered as error:
        why = error.__cause__.message if isinstance(error.__cause__, KvrouterError) else error.message
        return EngineAnswer(spec.url, None, why.removeprefix(f"{spec.url}/v1/models: "))
    except ConfigError as error:
        raise ConfigError(f"--url: {error.message}", param="url") from error
