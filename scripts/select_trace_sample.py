"""Choose the rows that the replay plays from the Mooncake FAST'25 conversation trace.

    python -m scripts.select_trace_sample conversation_trace.jsonl

The same trace gives the same sample, byte for byte. The trace is in the ``FAST25-release/traces`` folder of
https://github.com/kvcache-ai/Mooncake; data/README.md says what was changed.
"""

from pathlib import Path

import click

from benchmarks.http_replay.ceiling import prompt_ceiling, trace_ceiling
from benchmarks.http_replay.synthesis import BLOCK_WORDS, prompt_word_numbers, scaled_tokens
from benchmarks.http_replay.trace import (
    TRACE_BLOCK_TOKENS,
    SampleRow,
    read_trace,
    select_sample,
    write_sample,
)

SAMPLE = Path(__file__).parent.parent / "data" / "mooncake-conversation-sample.jsonl"
VOCABULARY = 1024
BLOCK_SIZES = (16, 32)


def figures(rows: list[SampleRow]) -> dict[str, str]:
    """What data/README.md says about a sample, in its own words."""
    prompts = [prompt_word_numbers(row, VOCABULARY) for row in rows]
    facts = {
        "rows": f"{len(rows)}",
        "conversations": f"{len({row.conversation for row in rows})}",
        "input tokens": f"{sum(row.input_tokens for row in rows):,}",
        "output tokens": f"{sum(row.output_tokens for row in rows):,}",
        f"ceiling, {TRACE_BLOCK_TOKENS}-token blocks": f"{trace_ceiling(rows):.1%}",
        f"input tokens, {TRACE_BLOCK_TOKENS} as {BLOCK_WORDS}": f"{sum(map(len, prompts)):,}",
        f"output tokens, {TRACE_BLOCK_TOKENS} as {BLOCK_WORDS}": (
            f"{sum(scaled_tokens(row.output_tokens) for row in rows):,}"
        ),
    }
    for block_size in BLOCK_SIZES:
        share = prompt_ceiling(prompts, block_size=block_size)
        facts[f"ceiling, {TRACE_BLOCK_TOKENS} as {BLOCK_WORDS}, {block_size}-token blocks"] = f"{share:.1%}"
    return facts


@click.command(help=__doc__)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=SAMPLE, show_default=True)
@click.option("--rows", "rows_wanted", type=click.IntRange(min=4), default=300, show_default=True)
def main(trace: Path, output: Path, rows_wanted: int) -> None:
    """Write the sample and print its figures."""
    sample = select_sample(read_trace(trace), rows_wanted=rows_wanted)
    write_sample(output, sample)
    for name, value in figures(sample).items():
        click.echo(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
