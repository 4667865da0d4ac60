"""Cordons as files of one directory, which may also hold the cards."""

from pathlib import Path

from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.encoding import CORDONS, checked_namespace
from kvrouter.transports.records.file.folder import Folder, Stamp
from kvrouter.transports.records.file.store import FileRecords
from kvrouter.transports.records.stored import StoredCordons

ANSWER_S = 2.0
"""File operations must return within this, else the store counts as unreachable."""


class FileCordons(StoredCordons[Stamp]):
    """Keeps the cordons of ``namespace`` as files of ``directory``, for this user alone.

    ``on_refused`` is called once for each file that holds no cordon; such a file has no effect.
    """

    def __init__(self, directory: Path, *, namespace: str, on_refused: TroubleSink) -> None:
        folder = Folder(directory, checked_namespace(namespace))
        store = FileRecords(
            CORDONS,
            folder,
            is_host=False,
            what=f"the directory of cordons {folder.path}",
            answer_s=ANSWER_S,
            on_refused=on_refused,
        )
        super().__init__(store, why=_why)


def _why(error: Exception) -> str:
    return (
        str(error) if isinstance(error, TimeoutError) else f"the directory of cordons cannot be used: {error}"
    )
