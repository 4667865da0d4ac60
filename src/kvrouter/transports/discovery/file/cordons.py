"""Cordons as files of the directory of the cards."""

from pathlib import Path

from kvrouter.transports.discovery.card_tracker import TroubleSink
from kvrouter.transports.discovery.file.folder import Folder, Stamp
from kvrouter.transports.discovery.file.records import FileRecords
from kvrouter.transports.discovery.stored import StoredCordons
from kvrouter.transports.discovery.wire import CORDONS, checked_namespace

ANSWER_S = 2.0
"""File operations must come back within this, else the store cannot be asked."""


class FileCordons(StoredCordons[Stamp]):
    """Keeps the cordons of ``namespace`` as files of ``directory``, for this user alone.

    ``on_refused`` hears of files that hold no cordon, once each: they keep nobody from anything.
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
