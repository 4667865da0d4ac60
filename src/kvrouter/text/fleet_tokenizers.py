"""Whether the tokenizers that a fleet file names can be read here."""

from collections.abc import Iterator

from kvrouter.config.fleet import FleetFile
from kvrouter.config.problems import Problem
from kvrouter.core.errors import ConfigError
from kvrouter.text.encode_pool import EncodePool
from kvrouter.text.model import TextModel
from kvrouter.text.source import tokenizer_folder


def tokenizer_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Read every tokenizer and chat template that the file names; yield those that cannot be read."""
    pool = EncodePool()
    for position, model in enumerate(fleet.models):
        said = fleet.said_tokenizer(model)
        if said is None:
            continue
        try:
            folder = tokenizer_folder(said)
            TextModel.load(folder, context_length_tokens=model.mock_context_length, pool=pool)
        except ConfigError as error:
            yield Problem(("models", position, "tokenizer"), error.message)
