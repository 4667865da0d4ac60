"""``kvrouter fleet check``: every mistake of a fleet file, and of the engines that it names."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrouter.app.attach.attachment import NotAnswered, probe
from kvrouter.app.attach.spec import FileEngine, file_engines
from kvrouter.app.fleet_build import tokenizer_problems, tokenizer_warnings, topology_env_problems
from kvrouter.core.errors import KvrouterError
from kvrouter.engines.attach import Attached
from kvrouter.fleetfile.fleet_checks import examine_fleet, settings_in, settled, url_path
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_strict import strict_problems
from kvrouter.settings.problems import Document, Problem, dotted, read_document, without_password
from kvrouter.settings.problems import Path as FieldPath
from kvrouter.settings.setting_spec import SettingValue
from kvrouter.settings.sources import conflicts, load_settings
from kvrouter.transports.requests.port import WorkerUnreachable

KEY_FIELDS = ("api_key_env", "api_key_file")
"""The fields of an engine that locate its own key."""


class Mistake(msgspec.Struct, frozen=True):
    """One mistake: its line of the file, its field, and what it must be instead.

    ``is_unreachable``: an engine did not answer; the file may be right about it.
    """

    line: int
    field: str
    message: str
    is_unreachable: bool = False

    def shown(self, file: str) -> str:
        """Return it as one line."""
        return ": ".join(each for each in (f"{file}:{self.line}", self.field, self.message) if each)


class FleetCheck(msgspec.Struct, frozen=True):
    """The result for a file; ``summary`` describes it if there are no mistakes."""

    file: str
    is_good: bool
    summary: str | None
    mistakes: tuple[Mistake, ...]
    warnings: tuple[str, ...]


def check_fleet(
    path: Path,
    *,
    strict: bool,
    connect: bool,
    environ: Mapping[str, str],
    flags: Mapping[str, SettingValue] | None = None,
) -> FleetCheck:
    """Validate a fleet file as ``kvrouter up`` does with these settings of ``flags`` and ``environ``, read
    its tokenizers, and start no process.

    ``strict`` looks for more, and a warning fails the check; ``connect`` asks every running engine for its
    values, with its key of ``environ``, and compares. Raises ConfigError for an unreadable file, and for
    variables that ``kvrouter up`` refuses.
    """
    document = read_document(path)
    examined = examine_fleet(document, (_setting_problems, topology_env_problems, tokenizer_problems))
    mistakes = [_mistake(document, problem) for problem in examined.problems]
    warnings: list[str] = []
    fleet = examined.fleet
    if fleet is not None and not mistakes:
        loaded = load_settings(flags=flags or {}, environ=environ, document=document)
        warnings += [*loaded.warnings, *settled(fleet, loaded.settings).warnings]
        warnings += tokenizer_warnings(fleet)
        if strict:
            mistakes += [_mistake(document, problem) for problem in strict_problems(fleet)]
        if connect:
            answered = asyncio.run(_connected(fleet, environ))
            mistakes += [
                _mistake(document, problem, is_unreachable=number in answered.unreachable)
                for number, problem in enumerate(answered.problems)
            ]
            warnings += answered.warnings
    mistakes.sort(key=lambda mistake: mistake.line)
    is_good = not mistakes and not (strict and warnings)
    summary = summary_of(fleet) if fleet is not None and is_good else None
    return FleetCheck(str(path), is_good, summary, tuple(mistakes), tuple(warnings))


def summary_of(fleet: FleetFile) -> str:
    """Return the description of a file in one line."""
    n_workers = sum(group.n_workers for group in fleet.workers)
    workers = f"{n_workers} worker{'' if n_workers == 1 else 's'}"
    policy = fleet.kv_transfer
    kept = f"KV {policy.enforcement.value} on {policy.domain}" if policy else "no transfer policy"
    return f"{workers} for {', '.join(map(fleet.shown_name, fleet.models))}, {kept}"


def _setting_problems(fleet: FleetFile) -> list[Problem]:
    return conflicts(settings_in(fleet))


def _mistake(document: Document, problem: Problem, *, is_unreachable: bool = False) -> Mistake:
    line = document.line_of(problem.path)
    return Mistake(line, dotted(problem.path), problem.must, is_unreachable)


class _EngineAnswers(msgspec.Struct):
    """The engines' answers: mistakes, which of them are silent engines, and warnings."""

    problems: list[Problem] = []
    unreachable: set[int] = set()
    warnings: list[str] = []


async def _connected(fleet: FleetFile, environ: Mapping[str, str]) -> _EngineAnswers:
    """Ask every engine of the file, all at once."""
    engines = list(file_engines(fleet))
    paths = list(_url_paths(fleet))
    answers = await asyncio.gather(*(_probed(each, environ) for each in engines), return_exceptions=True)
    answered = _EngineAnswers()
    attached: list[tuple[FieldPath, FileEngine, Attached]] = []
    for path, engine, answer in zip(paths, engines, answers, strict=True):
        if isinstance(answer, Attached):
            attached.append((path, engine, answer))
            answered.warnings += [f"{dotted(path)}: {warning}" for warning in answer.warnings]
        elif isinstance(answer, NotAnswered) and isinstance(answer.__cause__, WorkerUnreachable):
            answered.unreachable.add(len(answered.problems))
            answered.problems.append(Problem(path, without_password(answer.__cause__.message)))
        elif isinstance(answer, KvrouterError):
            field = engine.spec.fields_at.get(answer.param or "")
            if answer.param in KEY_FIELDS:
                answered.problems.append(
                    Problem((*path[:3], answer.param), answer.message.removeprefix(f"{field}: "))
                )
                continue
            must = f"{engine.spec.url}: {answer.message}" if field is None else f"{field}: {answer.message}"
            answered.problems.append(Problem(path, must))
        elif isinstance(answer, BaseException):
            raise answer
    answered.problems += _block_size_problems(attached)
    return answered


async def _probed(engine: FileEngine, environ: Mapping[str, str]) -> Attached:
    return await probe(engine.with_key(environ))


def _url_paths(fleet: FleetFile) -> list[FieldPath]:
    """Return the path of the URL of each engine, in the order of the file."""
    return [
        url_path(position, group.engine, number)
        for position, group in enumerate(fleet.workers)
        if isinstance(group.engine, AttachedEngineSpec)
        for number in range(len(group.engine.all_urls))
    ]


def _block_size_problems(attached: list[tuple[FieldPath, FileEngine, Attached]]) -> list[Problem]:
    """Engines of one model with different block sizes: the first that joins would keep the others out."""
    problems = []
    for model in dict.fromkeys(found.model for _, _, found in attached):
        of_model = [each for each in attached if each[2].model == model]
        sizes = Counter(found.block_size for _, _, found in of_model)
        if len(sizes) < 2:
            continue
        usual = sizes.most_common(1)[0][0]
        problems += [
            Problem(
                path,
                f"{engine.spec.url}: its blocks have {found.block_size} tokens, and others of "
                f"{model!r} have {usual}: start it with blocks of {usual}",
            )
            for path, engine, found in of_model
            if found.block_size != usual
        ]
    return problems
