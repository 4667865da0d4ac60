"""Looks at a folder of cards again and again. Blocks: runs in threads."""

import os
import re
import threading
import time
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvrouter.core.errors import ProtocolError
from kvrouter.planes.discovery.file.folder import Folder, Stamp, read_record, stamp_of
from kvrouter.planes.discovery.wire import CardRecord

FILES_MAX = 16_384
"""How many files of one folder are looked at; that there are more is reported."""

_CARD_NAME = re.compile(r"worker-(0|[1-9][0-9]{0,18})\.json")
_HALF_NAME = re.compile(r"\.worker-[0-9]{1,19}\.[0-9a-f]{16}\.half")
"""A file that is being written, or whose writer died."""


class Scan(NamedTuple):
    """One look: the records in the order of their worker ids, and what else is there, told in one look."""

    looked_at_s: float
    records: list[tuple[CardRecord, Stamp]]
    troubles: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file in one state. ``record`` is None where there is none to be read, and ``trouble`` says why."""

    stamp: Stamp
    since_s: float
    record: CardRecord | None
    trouble: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.trouble is None


class Scanner:
    """Reads only the files that changed; removes those of ours that nobody renewed for very long.

    One looks at a time; all watchers of a process share it, so that one of them is told what is no card.
    """

    def __init__(self, folder: Folder, *, remove_after_s: float) -> None:
        self._folder = folder
        self._remove_after_s = remove_after_s
        self._seen: dict[str, _Seen] = {}
        self._told: set[str] = set()
        self._looking = threading.Lock()

    def look(self) -> Scan:
        """Return what is there now.

        Raises OSError when the folder cannot be read, ConfigError when it is not this user's alone.
        """
        with self._looking:
            return self._look()

    def _look(self) -> Scan:
        now = time.monotonic()
        self._folder.check()
        with os.scandir(self._folder.path) as entries:
            found = [entry.name for entry in islice(entries, FILES_MAX + 1)]
        before, self._seen = self._seen, {}
        for name in found[:FILES_MAX]:
            seen = self._see(name, before.get(name), now)
            if seen is not None:
                self._seen[name] = seen
        troubles = [(name, seen.trouble) for name, seen in self._seen.items() if seen.trouble is not None]
        if len(found) > FILES_MAX:
            troubles.append(("", f"more than {FILES_MAX} files: the others are not looked at"))
        news = [trouble for trouble in troubles if trouble[0] not in self._told]
        self._told = {name for name, _ in troubles}
        self._remove_old(now)
        records = [(seen.record, seen.stamp) for seen in self._seen.values() if seen.record is not None]
        records.sort(key=lambda pair: pair[0].card.worker_id)
        return Scan(now, records, [(str(self._folder.path / name), why) for name, why in news])

    def _see(self, name: str, before: _Seen | None, now: float) -> _Seen | None:
        """Look at one file; None when it vanished meanwhile."""
        path = self._folder.path / name
        try:
            stamp = stamp_of(path.lstat())
            if before is not None and before.stamp == stamp:
                return before
            if _HALF_NAME.fullmatch(name):
                return _Seen(stamp, now, None)
            if not _CARD_NAME.fullmatch(name):
                return _Seen(stamp, now, None, "no card of a worker")
            record, stamp = read_record(path)
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            return _Seen(stamp, now, None, str(error))
        return _Seen(stamp, now, record)

    def _remove_old(self, now: float) -> None:
        for name, seen in tuple(self._seen.items()):
            if not seen.is_ours or now - seen.since_s <= self._remove_after_s:
                continue
            path = self._folder.path / name
            try:
                if stamp_of(path.lstat()) == seen.stamp:
                    path.unlink()
            except OSError:
                continue
