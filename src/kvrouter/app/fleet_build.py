"""Fleet build: makes tokenizers, topology environments and mock engine configs from a fleet file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from kvrouter.app.text_models import read_text
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, ModelSpec, TopologySpec, WorkerGroup
from kvrouter.fleetfile.fleet_workers import mock_config, mock_workers, table_of
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.settings.problems import Document, Problem, config_error, problem_of
from kvrouter.text.model import FIRST_WORD_ID, TextModel, mock_words
from kvrouter.text.source import ENGINE_TOKENIZER, MOCK_TOKENIZER, checked_source, tokenizer_folder
from kvrouter.text.tokenizer import EncodePool
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env


def stated_context_length(fleet: FleetFile, model: ModelSpec) -> int | None:
    """The context length in tokens that the file states for a model's engines; None without one."""
    return model.mock_context_length if fleet.has_mocks(model) else model.context_length


def tokenizer_sources(fleet: FleetFile) -> dict[ModelName, str]:
    """The tokenizers that the file names for models of attached engines. Raises ConfigError for a source that
    is neither a folder here nor the name of a repository.
    """
    sources: dict[ModelName, str] = {}
    for position, model in enumerate(fleet.models):
        is_attached = any(isinstance(each.engine, AttachedEngineSpec) for each in fleet.groups_of(model))
        source = fleet.stated_tokenizer(model) if is_attached else None
        name = fleet.stated_name(model)
        if source is not None:
            with _naming(position):
                checked = checked_source(source)
            if name is not None:  # else the cards name it
                sources[ModelName(name)] = checked
    return sources


def load_texts(fleet: FleetFile, pool: EncodePool) -> dict[ModelName, TextModel]:
    """Load tokenizer and chat template of each model of mock engines. Raises ConfigError without them."""
    served = {fleet.model_of(group).mock_name for _, group in mock_workers(fleet)}
    return {
        ModelName(model.mock_name): TextModel.load(
            _folder_of(model.mock_tokenizer, position),
            context_length_tokens=model.mock_context_length,
            pool=pool,
        )
        for position, model in enumerate(fleet.models)
        if model.mock_name in served
    }


def _folder_of(source: str, position: int) -> Path:
    with _naming(position):
        return tokenizer_folder(source)


@contextmanager
def _naming(position: int) -> Iterator[None]:
    """Name the field of a model's tokenizer in an error."""
    try:
        yield
    except ConfigError as error:
        field = f"models[{position}].tokenizer"
        raise ConfigError(f"{field}: {error.message}", param=field) from error


def topology_env_of(group: WorkerGroup) -> TopologyEnv | None:
    """The topology environment of a group's workers; None where the file has none. Raises ConfigError."""
    variables = {str(name): value for name, value in group.topology_env.items()}
    return parse_topology_env(variables) if variables else None


def topology_env_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield the problems in a file's topology environments, variable by variable."""
    for position, group in enumerate(fleet.workers):
        variables = {str(name): value for name, value in group.topology_env.items()}
        while variables:
            try:
                parse_topology_env(variables)
                break
            except ConfigError as error:
                name = error.param or ""
                must = error.message.removeprefix(f"{name}: ")
                yield Problem(("workers", position, "topology_env", name), must)
                if variables.pop(name, None) is None:
                    break  # the variable is missing: its other problems are unknown


def tokenizer_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield the tokenizer problems that keep ``kvrouter up`` from starting. Those of mock engines are read;
    others must be a folder or the name of a repository.
    """
    pool = EncodePool()
    for position, model in enumerate(fleet.models):
        source = fleet.stated_tokenizer(model)
        if source is None:
            continue
        try:
            if fleet.has_mocks(model):
                _read_text(model, source, pool, takes_calls=False)
            else:
                checked_source(source)
        except ConfigError as error:
            yield Problem(("models", position, "tokenizer"), error.message)


def tokenizer_warnings(fleet: FleetFile) -> Iterator[str]:
    """Read the tokenizers of attached engines; yield why calls of a model would be routed by load."""
    pool = EncodePool()
    for position, model in enumerate(fleet.models):
        source = fleet.stated_tokenizer(model)
        if source is None or source == ENGINE_TOKENIZER or fleet.has_mocks(model):
            continue
        try:
            why = _read_text(model, source, pool, takes_calls=True).why_by_load
        except (KvrouterError, OSError, ValueError) as error:
            why = str(error)
        if why is not None:
            name = fleet.shown_name(model)
            yield f"models[{position}].tokenizer: {why}: calls of {name!r} are routed by load and text"


def _read_text(model: ModelSpec, source: str, pool: EncodePool, *, takes_calls: bool) -> TextModel:
    return read_text(
        source, context_length_tokens=model.mock_context_length, pool=pool, takes_calls=takes_calls
    )


def text_mock_config(
    fleet: FleetFile, group: WorkerGroup, worker_id: WorkerId, text: TextModel, *, bootstrap: Peer | None
) -> MockConfig:
    """The config of a mock engine in the file; it answers in words where the tokenizer is the mock's."""
    eos_ids = sorted(text.tokenizer.eos_ids)
    return mock_config(
        fleet,
        group,
        worker_id,
        bootstrap=bootstrap,
        vocab_size=text.tokenizer.vocab_size,
        answer_ids=_answer_ids(fleet, group, text),
        eos_token_id=eos_ids[0] if eos_ids else 0,
    )


def _answer_ids(fleet: FleetFile, group: WorkerGroup, text: TextModel) -> tuple[int, ...]:
    if fleet.model_of(group).mock_tokenizer == MOCK_TOKENIZER:
        return tuple(range(FIRST_WORD_ID, FIRST_WORD_ID + len(mock_words())))
    return tuple(sorted(set(range(text.tokenizer.vocab_size)) - text.tokenizer.special_ids))


def links_of(document: Document) -> LinkTable | None:
    """The link table of a fleet file, or of a part of one; None without one. Raises ConfigError."""
    topology = document.content.get("topology")
    if topology is None:
        return None
    try:
        return table_of(TopologySpec.model_validate(topology))
    except ValidationError as error:
        raise config_error(
            [problem_of(item, TopologySpec) for item in error.errors()], document.place
        ) from error
