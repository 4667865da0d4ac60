"""Choose the sessions of coding agents that the policies are compared on, from kv-cache-tester's.

    python -m scripts.select_sessions agentic_coding_80.jsonl.gz

Those sessions are taken, in their order and as they stand, whose every request has at most 200,000 tokens,
answer included: the context of the models that they were recorded with. The same file gives the same
selection, byte for byte.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

SELECTION = Path(__file__).parent.parent / "data" / "agentic-coding-sessions.jsonl.gz"
CONTEXT_TOKENS = 200_000


class Turn(msgspec.Struct):
    """A request, or a sub-agent that has ``requests`` of its own."""

    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    requests: "list[Turn] | None" = None


class Session(msgspec.Struct):
    """What the choice is made by."""

    requests: list[Turn]


def turns(of: list[Turn]) -> Iterator[Turn]:
    """Yield the requests, those of sub-agents included."""
    for turn in of:
        if turn.requests is None:
            yield turn
        else:
            yield from turns(turn.requests)


def select(lines: list[bytes]) -> tuple[list[bytes], int]:
    """Return the lines of sessions that are short enough, and how many requests they have."""
    chosen: list[bytes] = []
    n_requests = 0
    for line in lines:
        of_session = [*turns(msgspec.json.decode(line, type=Session).requests)]
        if all(turn.input_tokens + turn.output_tokens <= CONTEXT_TOKENS for turn in of_session):
            chosen.append(line)
            n_requests += len(of_session)
    return chosen, n_requests


def packed(lines: list[bytes]) -> bytes:
    """Return the lines as a gzip file that has no name and no time."""
    return gzip.compress(b"".join(lines), zlib.Z_BEST_COMPRESSION, mtime=0)


@click.command(help=__doc__)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default=SELECTION, show_default=True
)
def main(trace: Path, output: Path) -> None:
    """Write the selection and print what it has."""
    with gzip.open(trace) as file:
        chosen, n_requests = select(file.readlines())
    output.write_bytes(packed(chosen))
    click.echo(f"{len(chosen)} sessions, {n_requests:,} requests, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
