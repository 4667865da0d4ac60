"""Cordons as files of the directory of the cards: ``cordon-<digest>.json``, one for each."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvrouter.core.cordons import CORDONS_MAX, Cordon, cordon_digest
from kvrouter.core.errors import ConfigError, CordonsUnavailable, ProtocolError
from kvrouter.transports.discovery.card_tracker import StoreRefusals, TroubleSink
from kvrouter.transports.discovery.file.folder import CORDON_NAME, Folder, read_own_file
from kvrouter.transports.discovery.wire import (
    CORDON_MAX_BYTES,
    checked_namespace,
    decode_cordon,
    encode_cordon,
)

ANSWER_S = 2.0
"""File operations must come back within this, else the store cannot be asked."""

_T = TypeVar("_T")


class FileCordons:
    """Keeps the cordons of ``namespace`` as files of ``directory``, for this user alone.

    ``on_refused`` hears of files that hold no cordon, once each: they keep nobody from anything.
    """

    look_s = 1.0

    def __init__(self, directory: Path, *, namespace: str, on_refused: TroubleSink) -> None:
        self._folder = Folder(directory, checked_namespace(namespace))
        self._refusals = StoreRefusals(on_refused)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="cordons")
        self._stuck: Callable[[], bool] | None = None
        """Whether work that did not come back in time has: a directory that hangs holds one thread."""

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon; nothing where the directory was never made."""
        cordons, troubles = await self._in_thread(self._read)
        for name, why in troubles.items():
            if why:
                self._refusals.tell(name, str(self._folder.path / name), why)
            else:
                self._refusals.forget(name)
        return cordons

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, over the one of the same level, name and source."""

        def write() -> None:
            self._folder.open()
            self._folder.replace(_name_of(cordon), encode_cordon(cordon))

        await self._in_thread(write)

    async def remove(self, cordon: Cordon) -> None:
        """Remove the cordon of this level, name and source; idempotent."""

        def unlink() -> None:
            self._folder.open()
            (self._folder.path / _name_of(cordon)).unlink(missing_ok=True)

        await self._in_thread(unlink)

    def _read(self) -> tuple[tuple[Cordon, ...], dict[str, str]]:
        """Every cordon, and by file what hinders reading it; nothing where it is read."""
        try:
            self._folder.check()
            names = sorted(
                filter(CORDON_NAME.fullmatch, (found.name for found in self._folder.path.iterdir()))
            )
        except FileNotFoundError:
            return (), {}
        cordons, troubles = [], dict[str, str]()
        for name in names[:CORDONS_MAX]:
            try:
                content, _ = read_own_file(self._folder.path / name, bytes_max=CORDON_MAX_BYTES)
                cordon = decode_cordon(content)
                if _name_of(cordon) != name:
                    raise ProtocolError(f"holds the cordon of {cordon.place}", param="name")
            except FileNotFoundError:
                continue
            except (OSError, ProtocolError) as error:
                troubles[name] = str(error)
            else:
                cordons.append(cordon)
                troubles[name] = ""
        return tuple(cordons), troubles

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run what blocks. Raises CordonsUnavailable when it fails, or does not come back."""
        if self._stuck is not None and not self._stuck():
            raise CordonsUnavailable(f"the directory of cordons {self._folder.path} does not answer")
        job = self._threads.submit(work)
        waiting = asyncio.wrap_future(job)
        done, _ = await asyncio.wait({waiting}, timeout=ANSWER_S)
        if not done:
            if not job.cancel():
                self._stuck = job.done
            waiting.cancel()
            raise CordonsUnavailable(
                f"the directory of cordons {self._folder.path} did not answer within {ANSWER_S:g} s"
            )
        try:
            return waiting.result()
        except OSError as error:
            raise CordonsUnavailable(f"the directory of cordons cannot be used: {error}") from error
        except ConfigError as error:
            raise CordonsUnavailable(f"the directory of cordons cannot be used: {error.message}") from error


def _name_of(cordon: Cordon) -> str:
    return f"cordon-{cordon_digest(cordon.level, cordon.name, cordon.source)}.json"
