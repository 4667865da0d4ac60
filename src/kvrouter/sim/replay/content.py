"""The block hashes of replayed prompts, made of a trace's names for pieces of them."""

from array import array

import numpy as np
import numpy.typing as npt

from kvrouter.core.errors import ConfigError

U64 = npt.NDArray[np.uint64]

_MIX = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xD1342543DE82EF95)


def check_block_size(piece_tokens: int, block_size: int) -> None:
    """Raise ConfigError where blocks cannot be made of a trace's pieces, nor pieces of blocks."""
    if piece_tokens % block_size and block_size % piece_tokens:
        raise ConfigError(
            f"block_size: {block_size} tokens neither divide the trace's pieces of {piece_tokens} tokens nor "
            "are a multiple of them",
            param="block_size",
        )


def block_names(pieces: "array[int]", piece_tokens: int, *, n_tokens: int, block_size: int) -> U64:
    """Return 64 bits for each full block of a prompt: equal where its pieces are.

    A block of several pieces is named by all of them; a piece of several blocks gives each its own name.
    """
    names: U64 = np.frombuffer(pieces, dtype=np.uint64)
    n_blocks = n_tokens // block_size
    if block_size == piece_tokens:
        return _mixed(names[:n_blocks])
    if block_size < piece_tokens:
        parts = np.arange(piece_tokens // block_size, dtype=np.uint64) * _STEP
        return _mixed((names[:, None] * _MIX + parts).ravel()[:n_blocks])
    ratio = block_size // piece_tokens
    whole = _mixed(names[: n_blocks * ratio]).reshape(n_blocks, ratio)
    places = _mixed(np.arange(ratio, dtype=np.uint64)) | np.uint64(1)
    return _mixed((whole * places).sum(axis=1, dtype=np.uint64))


def _mixed(names: U64) -> U64:
    mixed = names + np.uint64(1)
    mixed *= _STEP
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed
