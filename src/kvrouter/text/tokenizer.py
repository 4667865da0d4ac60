"""From text to token ids and back, as the model's own ``tokenizer.json`` says."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.requests import TokenBuffer
from kvrouter.text.folder import read_json_object, token_content
from kvrouter.text.pieces import TokenPieces
from kvrouter.text.token_lengths import longest_token_chars, normal_forms, normalized_bytes

EOS_FILES = ("generation_config.json", "config.json")


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads at once; nothing in it changes."""

    def __init__(
        self, backend: Backend, *, eos_tokens: Iterable[str] = (), eos_ids: Iterable[int] = ()
    ) -> None:
        """Take over ``backend``. ``eos_tokens`` that the vocabulary lacks are an error."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab()
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that detokenizing leaves out."""
        self.eos_ids = frozenset(eos_ids) | {_id_of(vocabulary, token) for token in eos_tokens}
        """Ids after which the model has nothing more to say."""
        self.bos_ids = _ids_before_text(backend)
        """Ids that the post-processor puts before a text; usually one or none."""
        self.token_max_chars = longest_token_chars(backend)
        """How many characters of a text one token stands for at most; None where that has no bound."""
        self._normal_forms = normal_forms(backend)
        self.pieces = None
        """The text of each token, for models whose decoder is byte-level; None for all others."""
        if isinstance(backend.decoder, decoders.ByteLevel):
            self.pieces = TokenPieces.of(vocabulary, skipped=self.special_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and, where they exist, the configurations that name the end tokens."""
        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read the tokenizer {path}: {error.strerror}", param=str(path)
            ) from error
        try:
            backend = Backend.from_buffer(content)
        except ValueError as error:
            raise ConfigError(f"{path} is not a tokenizer: {error}", param=str(path)) from error
        eos_token = token_content(read_json_object(folder / "tokenizer_config.json").get("eos_token"))
        eos_ids: set[int] = set()
        for name in EOS_FILES:
            eos_ids.update(_as_ids(read_json_object(folder / name).get("eos_token_id")))
        return cls(backend, eos_tokens=[eos_token] if eos_token else [], eos_ids=eos_ids)

    def encode(self, text: str) -> TokenBuffer:
        """Return the ids of ``text`` alone, for text that a chat template made. The GIL is free meanwhile.

        A special token written out in ``text`` becomes that special token, as in every engine.
        """
        # The batch form is the only one that skips offsets: two thirds of the time of a plain encode.
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequest(
                "the prompt is not text, or half a surrogate pair", param="prompt"
            ) from error
        return array("I", encoding.ids)

    def encode_prompt(self, text: str) -> TokenBuffer:
        """Return the ids of a plain completion prompt: ``bos_ids``, then those of ``text``."""
        ids = self.encode(text)
        return self.bos_ids + ids if self.bos_ids else ids

    def normalized_bytes(self, text: str) -> int:
        """Return how many bytes of UTF-8 the normalizer makes of ``text``: what encoding takes memory for."""
        return normalized_bytes(text, self._normal_forms)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``; special and unknown ids have none; bad UTF-8 becomes U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def _as_ids(entry: object) -> list[int]:
    """Return the ids of an entry that is an id, a list of ids, or absent."""
    entries = entry if isinstance(entry, list) else [entry]
    return [each for each in entries if isinstance(each, int)]


def _id_of(vocabulary: Mapping[str, int], token: str) -> int:
    token_id = vocabulary.get(token)
    if token_id is None:
        raise ConfigError(f"the vocabulary has no end token {token!r}", param="eos_token")
    return token_id


def _ids_before_text(backend: Backend) -> TokenBuffer:
    """Return the ids that the post-processor adds in front; what it adds behind would end the prompt."""
    plain = backend.encode("a", add_special_tokens=False).ids
    processed = backend.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(processed)) if processed[at : at + len(plain)] == plain), 0)
    return array("I", processed[:start])
