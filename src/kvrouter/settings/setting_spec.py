"""The specs of all settings, without the models that validate them: flags are made from this alone.

``make docs`` writes ``settings.json`` from the settings tree, so that ``--help`` and a shell's completion
import no model; a test compares the two.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from kvrouter.settings.variables import spellings

SettingValue = bool | int | float | str
"""A setting before validation, as a source gives it."""


class SettingGroup(StrEnum):
    """The heading under which ``--help`` and the documentation list a setting."""

    ROUTING = "Routing"
    BUSY = "Busy workers and admission"
    TOPOLOGY = "Topology"
    CACHE = "Cache prediction (without KV events)"
    RECOVERY = "Retries and deadlines"
    FRONTEND = "Frontend"
    REPLICAS = "Replicas"
    PLANES = "Between processes"
    RECORDING = "Recording"
    LOGS = "Logs"


class SettingKind(StrEnum):
    """How the text of a flag or a variable becomes a value; the value of each is its name in ``--help``."""

    SWITCH = "BOOL"
    WHOLE = "INT"
    NUMBER = "NUMBER"
    CHOICE = "CHOICE"
    TEXT = "TEXT"
    HIDDEN = "SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aliases:
    """Further names of one setting, under which Dynamo's users know it: of its flag, variable and field."""

    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """One setting, complete: what flags, variables and pages are made from."""

    section: str
    name: str
    flag: str | None
    variable: str
    group: SettingGroup
    unit: str | None
    kind: SettingKind
    choices: tuple[str, ...]
    default: object
    limits: str
    meaning: str
    aliases: Aliases = Aliases()

    @property
    def variables(self) -> tuple[str, ...]:
        """Every variable that sets it, its own first."""
        own = (self.variable, *self.aliases.variables)
        return tuple(spelling for name in own for spelling in spellings(name))

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag that sets it, its own first."""
        return () if self.flag is None else (self.flag, *self.aliases.flags)

    @property
    def yaml_key(self) -> str:
        """The dotted path of the key in a YAML file."""
        return f"{self.section}.{self.name}"

    @property
    def default_text(self) -> str:
        """The default as people write it in a shell."""
        if self.default is None:
            return "unset"
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        return str(self.default)

    def parse(self, text: str) -> SettingValue | None:
        """Return the value of ``text``; raise ValueError with what it must be otherwise.

        ``none`` unsets a number that may be unset.
        """
        text = text.strip()
        if (
            self.default is None
            and self.kind in (SettingKind.WHOLE, SettingKind.NUMBER)
            and text.lower() == "none"
        ):
            return None
        if self.kind is SettingKind.SWITCH:
            return parse_switch(text)
        if self.kind is SettingKind.WHOLE:
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"must be a whole number, not {text!r}") from None
        if self.kind is SettingKind.NUMBER:
            try:
                return float(text)
            except ValueError:
                raise ValueError(f"must be a number, not {text!r}") from None
        return text


_SWITCH_WORDS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)


def parse_switch(text: str) -> bool:
    """Return the value of a word for on or off; raise ValueError for any other text."""
    value = _SWITCH_WORDS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"must be true or false, not {text!r}")
    return value


SETTINGS_FILE = Path(__file__).with_name("settings.json")
"""Where every setting is written, in the order of the settings tree."""


def settings_text(specs: Iterable[SettingSpec]) -> str:
    """Return what :data:`SETTINGS_FILE` has to hold for these settings: JSON, one of them a line."""
    lines = ",\n".join(json.dumps(asdict(spec), ensure_ascii=False) for spec in specs)
    return f"[\n{lines}\n]\n"


@cache
def written_settings() -> tuple[SettingSpec, ...]:
    """Return every setting, as :data:`SETTINGS_FILE` has it."""
    return tuple(_spec(entry) for entry in json.loads(SETTINGS_FILE.read_text("utf-8")))


def written_setting(yaml_key: str) -> SettingSpec:
    """Return the setting with this key, as ``planes.request_plane``."""
    return next(spec for spec in written_settings() if spec.yaml_key == yaml_key)


def _spec(entry: dict[str, Any]) -> SettingSpec:
    aliases = {name: tuple(values) for name, values in entry.pop("aliases").items()}
    return SettingSpec(
        group=SettingGroup(entry.pop("group")),
        kind=SettingKind(entry.pop("kind")),
        choices=tuple(entry.pop("choices")),
        aliases=Aliases(**aliases),
        **entry,
    )
