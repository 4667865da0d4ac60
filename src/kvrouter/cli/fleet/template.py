"""``kvrouter fleet init``: a fleet file to begin with, as its owner would write it, with comments."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from kvrouter.app.atomic_file import check_folder, write_atomic
from kvrouter.app.attach.attachment import NotAnswered, probe
from kvrouter.cli.fleet.flags import FleetTemplate
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.secret import secret_variable
from kvrouter.core.workers import Role
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_engines import MOCK, url_mistake
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.worker_options import EngineUrls
from kvrouter.settings.problems import Document, dotted, parse_document, without_password
from kvrouter.settings.problems import Path as FieldPath
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE

_MOCK_WORKERS = {Role.PREFILL: 1, Role.DECODE: 2, Role.BOTH: 4}
"""How many mock workers of a role a group has."""


class _Group(NamedTuple):
    name: str
    role: Role
    zone: str | None
    urls: tuple[str, ...] = ()
    model: str | None = None
    """None where the file has one model."""


class _Placed(NamedTuple):
    """An engine's role and zone, as ``--url`` has them, and the model that it serves if that is known."""

    role: Role
    zone: str | None
    url: str
    model: str | None = None


class EngineAnswer(NamedTuple):
    """The answer of the engine at ``url``; ``attached`` is None where it does not answer, for ``why``."""

    url: str
    attached: Attached | None
    why: str = ""

    @property
    def lines(self) -> list[str]:
        """The answer in words: what the engine is, and its warnings."""
        found = self.attached
        if found is None:
            return [f"{self.url}: does not answer now ({self.why}): it is asked when the fleet is run"]
        events = "KV events" if found.publishes_kv_events else "no KV events"
        size = f"blocks of {found.block_size or 'unknown'} tokens"
        first = f"{self.url}: {found.version} serves {found.model}: {size}, {events}"
        return [first, *(f"warning: {warning}" for warning in found.warnings)]


class WrittenFleet(NamedTuple):
    """A file's content, and what the engines answered that were asked for their model."""

    fleet: FleetFile
    answers: tuple[EngineAnswer, ...]


def write_fleet(
    path: Path, engines: EngineUrls, template: FleetTemplate, environ: Mapping[str, str], *, replace: bool
) -> WrittenFleet:
    """Write a valid fleet file. Without a model in ``template`` engines are asked for it, with their key of
    ``environ``.

    Raises ConfigError for a template that makes no valid fleet, for an engine of another kind, and for an
    existing file unless ``replace``.
    """
    check_folder(path)
    if path.exists() and not replace:
        raise ConfigError(
            f"{path}: is there already: give another name, or --force to replace it", param="file"
        )
    answers: tuple[EngineAnswer, ...] = ()
    text = fleet_text(engines, template, name=path.name)
    fleet = load_fleet(parse_document(text, str(path))).fleet
    if engines.urls and template.model is None:
        answers = ask_engines(engines.engine, [each.url for each in _placed(engines)], environ)
        text = fleet_text(engines, template, answers, name=path.name)
        fleet = load_fleet(parse_document(text, str(path))).fleet
    write_atomic(path, text.encode())
    return WrittenFleet(fleet, answers)


class _FlagDocument(Document):
    """A fleet file that was made of flags: its mistakes are located by them."""

    def place(self, path: FieldPath) -> str:
        """Return the flag that the value came from."""
        return "--url" if path[:1] in (("workers",), ("models",)) else dotted(path)


def url_document(engines: EngineUrls) -> Document:
    """Return the fleet file of the engines at ``--url``: what they serve is asked when it is run. Raises
    ConfigError.
    """
    document = parse_document(fleet_text(engines, FleetTemplate()), "--url")
    return _FlagDocument(document.name, document.content, {})


def fleet_text(
    engines: EngineUrls,
    template: FleetTemplate,
    answers: Sequence[EngineAnswer] = (),
    *,
    name: str = "fleet.yaml",
) -> str:
    """Return the file, which is called ``name``. Raises ConfigError for what contradicts itself."""
    is_mock = engines.engine == MOCK
    models: list[str | None] = [template.model]
    if is_mock:
        groups = _mock_groups(engines, template)
    else:
        placed = _placed(engines, template, answers)
        models = list(dict.fromkeys(each.model for each in placed))
        groups = _engine_groups(placed, models)
    zones = list(dict.fromkeys(group.zone for group in groups if group.zone is not None))
    splits = any(group.role is Role.PREFILL for group in groups)
    parts = [
        f"# Check it: kvrouter fleet check --strict {name}\n"
        f"# Run it: kvrouter up --fleet {name}\n"
        "# Every key, with its default and its limits: docs/fleet-file.md of kvrouter.\n"
        "version: 1\n",
        _models(models, is_mock=is_mock),
    ]
    if zones:
        parts.append(_topology(splits=splits, is_mock=is_mock))
    parts.append(
        "# Groups of workers that are alike; they are numbered over the whole file, from 1.\nworkers:\n"
    )
    parts[-1] += "".join(_group(group, engines.engine) for group in groups)
    parts.append(f"{_SETTINGS}{_MOCK_SETTINGS if is_mock else _ENGINE_SETTINGS}")
    return "\n".join(parts)


_SETTINGS = "# Settings, as flags have them; a flag or a variable wins over the file.\n"
_MOCK_SETTINGS = "# frontend: {http_port: 8000}\n# router: {router_mode: kv}\n"
_ENGINE_SETTINGS = (
    "frontend:\n"
    "  # http_port: 8000\n"
    "  tokenize_fallback: engine   # engines tokenize what cannot be tokenized here, at their /tokenize\n"
    "# router: {router_mode: kv}\n"
)


def _mock_groups(engines: EngineUrls, template: FleetTemplate) -> list[_Group]:
    if engines.urls:
        raise ConfigError("--url: mock engines have none: name the kind with --engine", param="url")
    if not template.zones:
        return [_Group(_name_of(Role.BOTH, None), Role.BOTH, None)]
    return [
        _Group(_name_of(role, zone), role, zone)
        for zone in template.zones
        for role in (Role.PREFILL, Role.DECODE)
    ]


def _engine_groups(placed: Sequence[_Placed], models: Sequence[str | None]) -> list[_Group]:
    alike: dict[tuple[Role, str | None, str | None], list[str]] = {}
    for each in placed:
        alike.setdefault((each.role, each.zone, each.model), []).append(each.url)
    has_one = len(models) == 1
    return [
        _Group(
            _name_of(role, zone) + ("" if has_one else f"-{models.index(model) + 1}"),
            role,
            zone,
            tuple(urls),
            None if has_one else model,
        )
        for (role, zone, model), urls in alike.items()
    ]


def _name_of(role: Role, zone: str | None) -> str:
    stem = "worker" if role is Role.BOTH else role.value
    return stem if zone is None else f"{stem}-{zone}"


def _placed(
    engines: EngineUrls, template: FleetTemplate | None = None, answers: Sequence[EngineAnswer] = ()
) -> list[_Placed]:
    """Return the engines at ``--url``, each with its model as the template or else the engine states."""
    if not engines.urls:
        raise ConfigError(f"--url: is required, once for each {engines.engine} server", param="url")
    if template is not None and template.zones:
        raise ConfigError("--zone: is of mock engines: say --url ROLE@ZONE=URL", param="zone")
    placed = [_placed_url(given) for given in engines.urls]
    seen: set[str] = set()
    for each in placed:
        if each.url in seen:
            raise ConfigError(f"--url: {each.url} is given twice", param="url")
        seen.add(each.url)
    stated = None if template is None else template.model
    known = {each.url: each.attached.model for each in answers if each.attached is not None}
    served = list(dict.fromkeys(known.values()))
    if len(served) > 1 and (silent := [each.url for each in placed if each.url not in known]):
        raise ConfigError(
            f"--model: is required: the engines serve {', '.join(served)}, and {silent[0]} does not answer",
            param="model",
        )
    only = stated or (served[0] if len(served) == 1 else None)
    return [each._replace(model=only or known.get(each.url)) for each in placed]


def _placed_url(given: str) -> _Placed:
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
    return _Placed(Role(role_text) if role_text else Role.BOTH, zone or None, url.rstrip("/"))


def _models(models: Sequence[str | None], *, is_mock: bool) -> str:
    if is_mock:
        return (
            "models:\n"
            f'  - name: {_text(models[0] or MOCK)}   # what clients put into "model"\n'
            "    tokenizer: mock   # or a folder with tokenizer.json, or a Hugging Face repository\n"
            "    block_size: 64   # tokens in one KV block, on every worker\n"
            "    context_length: 32768\n"
        )
    named = [
        "  - name:   # each engine's own first name, which is asked\n"
        if model is None
        else f"  - name: {_text(model)}   # as the engines serve it\n"
        for model in models
    ]
    return (
        f"models:\n{''.join(named)}"
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
    if group.model is not None:
        lines.append(f"    model: {_text(group.model)}")
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


def ask_engines(kind: str, urls: Sequence[str], environ: Mapping[str, str]) -> tuple[EngineAnswer, ...]:
    """Ask all engines at once, with their key of ``environ``. Raises ConfigError for a server of another
    kind, and for one that asks for a key.
    """
    key = secret_variable(environ, ENGINE_KEY_VARIABLE)
    specs = [AttachSpec(kind=kind, url=url, worker_id=WorkerId(0), api_key=key) for url in urls]
    return asyncio.run(_asked(specs))


async def _asked(specs: Sequence[AttachSpec]) -> tuple[EngineAnswer, ...]:
    return tuple(await asyncio.gather(*map(_answer, specs)))


async def _answer(spec: AttachSpec) -> EngineAnswer:
    try:
        return EngineAnswer(spec.url, await probe(spec))
    except NotAnswered as error:
        why = error.__cause__.message if isinstance(error.__cause__, KvrouterError) else error.message
        return EngineAnswer(spec.url, None, why.removeprefix(f"{spec.url}/v1/models: "))
    except ConfigError as error:
        raise ConfigError(f"--url: {error.message}", param="url") from error
