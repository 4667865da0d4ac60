"""Settings as environment variables, for a process that is to run with the same ones."""

from collections.abc import Mapping

from pydantic import SecretStr

from kvrouter.config.setting import Kind
from kvrouter.config.tree import SETTINGS, Settings


def environment_of(settings: Settings, *sections: str) -> dict[str, str]:
    """Return the variables that make a process run with ``sections`` of ``settings``.

    What nobody set has no variable: that process has the same defaults, and the same fleet file.
    """
    environ: dict[str, str] = {}
    for spec in SETTINGS:
        if spec.section not in sections:
            continue
        section = getattr(settings, spec.section)
        if spec.name not in section.model_fields_set:
            continue
        value = getattr(section, spec.name)
        if isinstance(value, SecretStr):
            environ[spec.variable] = value.get_secret_value()
        elif isinstance(value, bool):
            environ[spec.variable] = "true" if value else "false"
        elif value is not None:
            environ[spec.variable] = str(value)
        elif spec.kind in (Kind.WHOLE, Kind.NUMBER):
            environ[spec.variable] = "none"
    return environ


def environment_with(own: Mapping[str, str], settings: Settings, *sections: str) -> dict[str, str]:
    """Return ``own`` with ``sections`` of ``settings``. A setting's further names are not handed on: a flag
    of this process may have overruled them.
    """
    told = environment_of(settings, *sections)
    overruled = {name for spec in SETTINGS if spec.variable in told for name in spec.variables}
    return {name: text for name, text in own.items() if name not in overruled} | told
