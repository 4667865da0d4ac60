"""Settings of Dynamo that have no effect here: the reason for each, and what there is instead.

A name with a value that asks for the existing behaviour is accepted. ``dynamo_settings.json`` holds them; a
reason that several share is there once, under the key that they refer to.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrouter.settings.setting_spec import SettingKind, parse_switch

NOT_SET = ("", "none")
"""The texts by which a variable or a flag of Dynamo's leaves it unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One of Dynamo's settings: its field, flags and variables. ``met`` are the values that ask for the
    existing behaviour. ``section`` is the group of settings that its flag is listed with; those of the router
    are fields of ``KvRouterConfig`` too.
    """

    name: str
    section: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    kind: SettingKind
    met: tuple[object, ...] = ()
    why: str

    @property
    def message(self) -> str:
        """The message on it, after its name."""
        return f"has no effect here: {self.why}"

    def is_met_by(self, value: object) -> bool:
        """Whether ``value`` asks only for the existing behaviour."""
        return value is None or any(type(each) is type(value) and each == value for each in self.met)

    def is_met_by_text(self, text: str) -> bool:
        """Whether the text of a flag or a variable does."""
        text = text.strip()
        if text.lower() in NOT_SET:
            return True
        try:
            if self.kind is SettingKind.SWITCH:
                return self.is_met_by(parse_switch(text))
            if self.kind is SettingKind.WHOLE:
                return self.is_met_by(int(text))
            if self.kind is SettingKind.NUMBER:
                return self.is_met_by(float(text))
        except ValueError:
            return False
        return self.is_met_by(text)


FOREIGN_FILE = Path(__file__).with_name("dynamo_settings.json")

_written: Mapping[str, Any] = json.loads(FOREIGN_FILE.read_text("utf-8"))
_reasons: Mapping[str, str] = _written["reasons"]


def _foreign(entry: dict[str, Any]) -> Foreign:
    names: dict[str, Any] = {name: tuple(entry.pop(name)) for name in ("flags", "variables", "met")}
    why = entry.pop("why")
    return Foreign(kind=SettingKind(entry.pop("kind")), why=_reasons.get(why, why), **names, **entry)


def _choices(name: str) -> Mapping[str, str]:
    return {choice: _reasons.get(why, why) for choice, why in _written[name].items()}


FOREIGN: tuple[Foreign, ...] = tuple(map(_foreign, _written["settings"]))
"""All of them, by subject."""

FOREIGN_MODES = _choices("modes")
"""Dynamo's router modes that kvrouter does not have, and what there is instead."""

FOREIGN_QUEUE_POLICIES = _choices("queue_policies")
"""Dynamo's queue policies that kvrouter does not have, and what there is instead."""

FOREIGN_DISCOVERY = _choices("discovery")
"""Dynamo's discovery backends that kvrouter does not have, and what there is instead."""

FOREIGN_VARIABLES: Mapping[str, Foreign] = {
    variable: foreign for foreign in FOREIGN for variable in foreign.variables
}
FOREIGN_FIELDS: Mapping[str, Foreign] = {
    foreign.name: foreign for foreign in FOREIGN if foreign.section == "router"
}
