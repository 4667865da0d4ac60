"""``kvrouter fleet init``: a fleet file to begin with, as its owner would write it, with comments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvrouter.app.atomic_file import check_folder, write_atomic
from kvrouter.cli.fleet.flags import FleetTemplate
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_engines import MOCK, url_mistake
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import parse_document, without_password

_MOCK_WORKERS = {Role.PREFILL: 1, Role.DECODE: 2, Role.BOTH: 4}
"""How many mock workers of a role a group has."""


@dataclass(frozen=True, slots=True)
class _Group:
    role: Role
    zone: str | None
    urls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        stem = "worker" if self.role is Role.BOTH else self.role.value
        return stem if self.zone is None else f"{stem}-{self.zone}"


def write_fleet(path: Path, template: FleetTemplate, *, replace: bool) -> FleetFile:
    """Write a valid fleet file, and return its content.

    Raises ConfigError for a template that makes no valid fleet, and for an existing file unless ``replace``.
    """
    check_folder(path)
    if path.exists() and not replace:
        raise ConfigError(
            f"{path}: is there already: give another name, or --force to replace it", param="file"
        )
    text = fleet_text(template, path.name)
    fleet = load_fleet(parse_document(text, str(path))).fleet
    write_atomic(path, text.encode())
    return fleet


def fleet_text(template: FleetTemplate, name: str = "fleet.yaml") -> str:
    """Return the file, which is called ``name``. Raises ConfigError for what contradicts itself."""
    groups = _groups(template)
    is_mock = template.engine == MOCK
    zones = list(dict.fromkeys(group.zone for group in groups if group.zone is not None))
    splits = any(group.role is Role.PREFILL for group in groups)
    parts = [
        f"# Check it: kvrouter fleet check --strict {name}\n"
        f"# Run it: kvrouter up --fleet {name}\n"
        "# Every key, with its default and its limits: docs/fleet-file.md of kvrouter.\n"
        "version: 1\n",
        _models(template, is_mock=is_mock),
    ]
    if zones:
        parts.append(_topology(splits=splits, is_mock=is_mock))
    parts.append(
        "# Groups of workers that are alike; they are numbered over the whole file, from 1.\nworkers:\n"
    )
    parts[-1] += "".join(_group(group, template.engine) for group in groups)
    parts.append(
        "# Settings, as flags have them; a flag or a variable wins over the file.\n"
        "# frontend: {http_port: 8000}\n"
        "# router: {router_mode: kv}\n"
    )
    return "\n".join(parts)


def _groups(template: FleetTemplate) -> list[_Group]:
    if template.engine == MOCK:
        if template.urls:
            raise ConfigError("--url: mock engines have none: name the kind with --engine", param="url")
        if not template.zones:
            return [_Group(Role.BOTH, None)]
        return [_Group(role, zone) for zone in template.zones for role in (Role.PREFILL, Role.DECODE)]
    if not template.urls:
        raise ConfigError(f"--url: is required, once for each {template.engine} server", param="url")
    if template.model is None:
        raise ConfigError("--model: is required: the name under which the engines serve it", param="model")
    if template.zones:
        raise ConfigError("--zone: is of mock engines: say --url ROLE@ZONE=URL", param="zone")
    groups: dict[tuple[Role, str | None], list[str]] = {}
    for given in template.urls:
        role, zone, url = _placed_url(given)
        groups.setdefault((role, zone), []).append(url)
    return [_Group(role, zone, tuple(urls)) for (role, zone), urls in groups.items()]


def _placed_url(given: str) -> tuple[Role, str | None, str]:
    before, equals, url = given.partition("=")
    if not equals or "://" in before:
        before, url = "", given
    role_text, at, zone = before.partition("@")
    roles = [role.value for role in Role]
    if (role_text or not at) and before and role_text not in roles:
        raise ConfigError(
            f"--url: the role must be one of {', '.join(roles)}, not {role_text!r}", param="url"
        )
    if at and not zone:
        raise ConfigError(f"--url: must be ROLE@ZONE=URL, not {without_password(given)!r}", param="url")
    mistake = url_mistake(url)
    if mistake is not None:
        raise ConfigError(f"--url: {mistake}, not {without_password(repr(url))}", param="url")
    return Role(role_text) if role_text else Role.BOTH, zone or None, url


def _models(template: FleetTemplate, *, is_mock: bool) -> str:
    name = _text(template.model or MOCK)
    if is_mock:
        return (
            "models:\n"
            f'  - name: {name}   # what clients put into "model"\n'
            "    tokenizer: mock   # or a folder with tokenizer.json, or a Hugging Face repository\n"
            "    block_size: 64   # tokens in one KV block, on every worker\n"
            "    context_length: 32768\n"
        )
    return (
        "models:\n"
        f"  - name: {name}   # as the engines serve it\n"
        "    # tokenizer: /models/folder   # or a Hugging Face repository. Left out: the engines' own\n"
        "    # block_size, context_length, ranks, capacity and event sources are asked of the engines\n"
    )


def _topology(*, splits: bool, is_mock: bool) -> str:
    text = "topology:\n  levels: [zone]   # broadest first, as [zone, rack]\n"
    links = (
        "links:   # between two workers: in a zone, and elsewhere",
        "  within:",
        "    zone: {latency_s: 0.0005, bandwidth_bytes_per_s: 12.5e9}",
        "  across: {latency_s: 0.002, bandwidth_bytes_per_s: 3.125e9}",
    )
    text += "".join(f"  {line}\n" if is_mock else f"  # {line}\n" for line in links)
    if not splits:
        return text
    return (
        f"{text}\n"
        "# KV goes from a prefill worker to a decode worker of its own zone, or nowhere. fallback: to\n"
        "# another zone where none is left in its own; preferred, with preferred_weight: by cost.\n"
        "kv_transfer:\n"
        "  domain: zone\n"
        "  enforcement: required\n"
    )


def _group(group: _Group, engine: str) -> str:
    lines = [f"  - name: {_text(group.name)}", f"    role: {group.role.value}"]
    if group.role is Role.BOTH:
        lines[-1] += "   # it prefills and decodes"
    if group.zone is not None:
        lines.append(f"    domains: {{zone: {_text(group.zone)}}}")
    if engine == MOCK:
        lines += [
            f"    replicas: {_MOCK_WORKERS[group.role]}",
            "    engine: {kind: mock, total_kv_blocks: 16384}",
        ]
    elif len(group.urls) == 1:
        lines.append(f"    engine: {{kind: {engine}, url: {_text(group.urls[0])}}}")
    else:
        lines += ["    engine:", f"      kind: {engine}", "      urls:", *_items(group.urls)]
    return "".join(f"{line}\n" for line in lines)


def _items(texts: Sequence[str]) -> list[str]:
    return [f"        - {_text(text)}" for text in texts]


def _text(text: str) -> str:
    """Return a text as YAML has it inside braces too, in quotes where it needs them."""
    return yaml.safe_dump([text], default_flow_style=True, width=10_000, allow_unicode=True).strip()[1:-1]
