"""Command-line flags made from the table of settings, and a help page that groups them."""

from collections.abc import Mapping
from pathlib import Path

import click

from kvrouter.cli.output import TABLE, Output
from kvrouter.settings.dynamo_settings import FOREIGN, Foreign
from kvrouter.settings.setting_spec import (
    SettingGroup,
    SettingKind,
    SettingSpec,
    SettingValue,
    written_settings,
)


class SettingOption(click.Option):
    """One flag, made from one setting. The settings parse its text, so that every source fails alike.

    A further name of the flag is a separate option, so that two names which differ are detected.
    """

    def __init__(self, spec: SettingSpec, flag: str) -> None:
        self.spec = spec
        self.is_alias = flag != spec.flag
        if spec.kind is SettingKind.SWITCH:
            names = f"{flag}/--no-{flag.removeprefix('--')}"
            super().__init__([names, parameter_name(spec, flag)], default=None)
        else:
            super().__init__([flag, parameter_name(spec, flag)], metavar=_metavar(spec), default=None)

    def write_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flag with its variable and default on one line, and its meaning below."""
        record = self.get_help_record(ctx)
        _write_setting(self.spec, record[0] if record else str(self.spec.flag), formatter)


def _write_setting(spec: SettingSpec, name: str, formatter: click.HelpFormatter) -> None:
    default = spec.default_text + (f" {spec.unit}" if spec.unit and spec.default is not None else "")
    formatter.write(f"{'':>{formatter.current_indent}}{name}  [{spec.variable}; default: {default}]\n")
    with formatter.indentation(), formatter.indentation():
        formatter.write_text(spec.meaning.replace("``", ""))
        also = (*spec.flags[1:], *spec.aliases.variables)
        if also:
            formatter.write_text(f"Also: {', '.join(also)}.")


class ForeignOption(click.Option):
    """A flag of Dynamo's without effect here: it is refused unless it asks for the existing behaviour."""

    def __init__(self, foreign: Foreign, flag: str) -> None:
        def refuse(_ctx: click.Context, option: click.Parameter, value: bool | str | None) -> None:
            met = foreign.is_met_by_text(value) if isinstance(value, str) else foreign.is_met_by(value)
            if not met:
                raise click.UsageError(f"{option.opts[0]} {foreign.message}")

        is_switch = foreign.kind is SettingKind.SWITCH
        names = f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag
        super().__init__(
            [names, f"foreign__{flag.strip('-').replace('-', '_')}"],
            default=None,
            hidden=True,
            expose_value=False,
            callback=refuse,
        )


def _output_of(_ctx: click.Context, _option: click.Parameter, text: str) -> Output:
    """Return what ``--output`` asks for."""
    form, equals, path = text.partition("=")
    if form == "json" and (path or not equals):
        return Output(is_json=not path, path=Path(path) if path else None)
    if text != "table":
        raise click.BadParameter(f"must be table, json or json=FILE, not {text!r}")
    return TABLE


output_option = click.option(
    "-o",
    "--output",
    callback=_output_of,
    default="table",
    show_default=True,
    metavar="table|json|json=FILE",
    help="How the result is printed: as a table, or as JSON; json=FILE prints the table and writes the JSON "
    "there.",
)
"""The flag of every command that prints a result; the command takes an :class:`Output`."""


def parameter_name(spec: SettingSpec, flag: str | None) -> str:
    """Return the name under which click hands the flag's text to the command."""
    own = f"{spec.section}__{spec.name}"
    return own if flag == spec.flag or flag is None else f"{own}__{flag.strip('-').replace('-', '_')}"


def given_flags(parameters: Mapping[str, object]) -> dict[str, SettingValue]:
    """Return the values on the command line, by YAML key, or by flag for a further name of one."""
    given: dict[str, SettingValue] = {}
    for spec in written_settings():
        for flag in spec.flags:
            value = parameters.get(parameter_name(spec, flag))
            if isinstance(value, bool | int | float | str):
                given[spec.yaml_key if flag == spec.flag else flag] = value
    return given


class SettingsCommand(click.Command):
    """A command that takes settings as flags, and lists them by group in its help: also those that come from
    the environment or a file alone.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then the settings of each group."""
        parameters = self.get_params(ctx)
        own = [parameter for parameter in parameters if not isinstance(parameter, SettingOption)]
        with formatter.section("Options"):
            formatter.write_dl([record for option in own if (record := option.get_help_record(ctx))])
        options = [parameter for parameter in parameters if isinstance(parameter, SettingOption)]
        flags = [option for option in options if not option.is_alias]
        sections = {flag.spec.section for flag in flags}
        for group in SettingGroup:
            of_group = [flag for flag in flags if flag.spec.group is group]
            if not of_group:
                continue
            with formatter.section(group.value):
                for flag in of_group:
                    flag.write_help(ctx, formatter)
                for spec in written_settings():
                    if spec.flag is None and spec.group is group and spec.section in sections:
                        _write_setting(spec, "no flag", formatter)


def setting_options(*sections: str) -> list[click.Option]:
    """Return a flag for every name of a setting of ``sections`` that has one, and Dynamo's flags without
    effect among those; without sections, for all.
    """

    def is_chosen(section: str) -> bool:
        return not sections or section in sections

    own = [
        SettingOption(spec, flag)
        for spec in written_settings()
        if is_chosen(spec.section)
        for flag in spec.flags
    ]
    foreign = [
        ForeignOption(each, flag) for each in FOREIGN if is_chosen(each.section) for flag in each.flags
    ]
    return [*own, *foreign]


def _metavar(spec: SettingSpec) -> str:
    return "|".join(spec.choices) if spec.choices else spec.kind.value
