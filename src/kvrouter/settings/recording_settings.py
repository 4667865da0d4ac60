"""The settings of a recording of traffic."""

from typing import Annotated

from annotated_types import Interval, MinLen

from kvrouter.settings.setting import Section, Setting, Whole
from kvrouter.settings.setting_spec import SettingGroup

FILE_BYTES_MIN = 64 * 1024


class RecordingSettings(Section):
    """Where a frontend records its traffic, and how much of it is kept."""

    folder: Annotated[
        Annotated[str, MinLen(1)] | None,
        Setting(SettingGroup.RECORDING, flag="--record", variable="KVROUTER_RECORD"),
    ] = None
    """The folder that this frontend's traffic is recorded in, for `kvrouter replay`: when requests came, how
    long they and their answers are, salted names of their blocks, where they went; no text, no token ids, no
    id of a client's. Each frontend needs a folder of its own; those of `kvrouter up --replicas` get one in
    it. Unset: nothing is recorded."""

    file_bytes: Annotated[
        Annotated[Whole, Interval(ge=FILE_BYTES_MIN)],
        Setting(
            SettingGroup.RECORDING,
            flag="--record-file-bytes",
            variable="KVROUTER_RECORD_FILE_BYTES",
            unit="bytes",
        ),
    ] = 64 * 1024 * 1024
    """How long a file of a recording becomes, packed, before the next one is begun. At most half of what all
    files may hold."""

    total_bytes: Annotated[
        Annotated[Whole, Interval(ge=2 * FILE_BYTES_MIN)],
        Setting(
            SettingGroup.RECORDING,
            flag="--record-total-bytes",
            variable="KVROUTER_RECORD_TOTAL_BYTES",
            unit="bytes",
        ),
    ] = 1024 * 1024 * 1024
    """What all files of recordings in the folder may hold together, those of earlier starts too; the oldest
    are removed to make room."""

    salt: Annotated[
        Annotated[str, MinLen(1)] | None,
        Setting(SettingGroup.RECORDING, flag="--record-salt", variable="KVROUTER_RECORD_SALT"),
    ] = None
    """A file with 32 random bytes or more, which salts the names of blocks and sessions, so that they are the
    same in the recordings of all frontends that share it, and of later starts. With it one can find out
    whether a known prompt is in a recording: keep it apart from recordings. Unset: each start draws a salt
    that is kept in memory alone."""
