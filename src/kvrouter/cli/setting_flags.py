"""Command-line flags made from the table of settings, and a help page that groups them."""

from collections.abc import Collection, Mapping
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

ALL_SETTINGS = "kvrouter.all_settings"
"""In the ``meta`` of a context: its help page shows all settings."""

FIRST_TO_SERVE = (
    "frontend.http_host",
    "frontend.http_port",
    "frontend.admin_token",
    "router.router_mode",
    "router.overlap_score_weight",
    "router.kv_events",
    "router.admission_queue_max",
    "recording.folder",
    "log.log_level",
    "log.log_format",
)
"""The settings that ``--help`` shows of a command that serves HTTP."""

FIRST_BETWEEN_PROCESSES = (
    "planes.namespace",
    "planes.discovery",
    "planes.discovery_dir",
    "planes.request_plane",
    "planes.event_plane",
    "planes.nats_server",
    "planes.plane_token",
    "planes.listen_host",
)
"""Those that it shows besides of a command that runs one process of many."""


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


class HelpAllOption(click.Option):
    """``--help-all``: the help page with all settings. ``--help`` shows those of ``first``, by YAML key."""

    def __init__(self, first: Collection[str]) -> None:
        def show(ctx: click.Context, _option: click.Parameter, is_asked: bool) -> None:
            if is_asked and not ctx.resilient_parsing:
                ctx.meta[ALL_SETTINGS] = True
                click.echo(ctx.get_help())
                ctx.exit()

        self.first = first
        super().__init__(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=show,
            help="Show all settings, and exit; --help shows those that matter first.",
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
        """Write the command's own options, then the settings of each group: the first to know, or all."""
        parameters = self.get_params(ctx)
        own = [parameter for parameter in parameters if not isinstance(parameter, SettingOption)]
        with formatter.section("Options"):
            formatter.write_dl([record for option in own if (record := option.get_help_record(ctx))])
        (help_all,) = (option for option in own if isinstance(option, HelpAllOption))
        options = [parameter for parameter in parameters if isinstance(parameter, SettingOption)]
        flags = {option.spec.yaml_key: option for option in options if not option.is_alias}
        sections = {option.spec.section for option in options}
        shown = [
            spec
            for spec in written_settings()
            if spec.section in sections and (ALL_SETTINGS in ctx.meta or spec.yaml_key in help_all.first)
        ]
        for group in SettingGroup:
            of_group = [spec for spec in shown if spec.group is group]
            if not of_group:
                continue
            with formatter.section(group.value):
                for spec in of_group:
                    if spec.flag is None:
                        _write_setting(spec, "no flag", formatter)
                    else:
                        flags[spec.yaml_key].write_help(ctx, formatter)


def setting_options(
    *sections: str, first: Collection[str] = (*FIRST_TO_SERVE, *FIRST_BETWEEN_PROCESSES)
) -> list[click.Option]:
    """Return a flag for every name of a setting of ``sections`` that has one, and Dynamo's flags without
    effect among those; without sections, for all. ``--help`` shows those of ``first``, ``--help-all`` all.
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
    return [HelpAllOption(first), *own, *foreign]


def _metavar(spec: SettingSpec) -> str:
    return "|".join(spec.choices) if spec.choices else spec.kind.value
