"""The flags that are made from the settings tree, and a help page that groups them."""

import click

from kvrouter.config.setting import Group, Kind, SettingSpec, SettingValue
from kvrouter.config.tree import SETTINGS


class SettingOption(click.Option):
    """One flag, made from one setting. Its text is read by the settings, so that every source fails alike."""

    def __init__(self, spec: SettingSpec) -> None:
        self.spec = spec
        if spec.flag is None:
            raise TypeError(f"{spec.yaml_key}: has no flag")
        if spec.kind is Kind.SWITCH:
            names = f"{spec.flag}/--no-{spec.flag.removeprefix('--')}"
            super().__init__([names, parameter_name(spec)], default=None)
        else:
            super().__init__([spec.flag, parameter_name(spec)], metavar=_metavar(spec), default=None)

    def write_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flag with its variable and default on one line, and what it means below."""
        record = self.get_help_record(ctx)
        _write_setting(self.spec, record[0] if record else str(self.spec.flag), formatter)


def _write_setting(spec: SettingSpec, name: str, formatter: click.HelpFormatter) -> None:
    default = spec.default_text + (f" {spec.unit}" if spec.unit and spec.default is not None else "")
    formatter.write(f"{'':>{formatter.current_indent}}{name}  [{spec.variable}; default: {default}]\n")
    with formatter.indentation(), formatter.indentation():
        formatter.write_text(spec.meaning.replace("``", ""))


def parameter_name(spec: SettingSpec) -> str:
    """Return the name under which click hands the flag's text to the command."""
    return f"{spec.section}__{spec.name}"


def given_flags(parameters: dict[str, SettingValue | None]) -> dict[str, SettingValue]:
    """Return what was given on the command line, by YAML key."""
    given = {spec.yaml_key: parameters.get(parameter_name(spec)) for spec in SETTINGS}
    return {key: value for key, value in given.items() if value is not None}


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
        flags = [parameter for parameter in parameters if isinstance(parameter, SettingOption)]
        sections = {flag.spec.section for flag in flags}
        for group in Group:
            of_group = [flag for flag in flags if flag.spec.group is group]
            if not of_group:
                continue
            with formatter.section(group.value):
                for flag in of_group:
                    flag.write_help(ctx, formatter)
                for spec in SETTINGS:
                    if spec.flag is None and spec.group is group and spec.section in sections:
                        _write_setting(spec, "no flag", formatter)


def setting_options(*sections: str) -> list[SettingOption]:
    """Return a flag for every setting of ``sections`` that has one; without sections, of all."""
    return [
        SettingOption(spec)
        for spec in SETTINGS
        if spec.flag is not None and (not sections or spec.section in sections)
    ]


def _metavar(spec: SettingSpec) -> str:
    return "|".join(spec.choices) if spec.choices else spec.kind.value
