"""The tokens of one answer as they come: the gaps between them, and the blocks that they fill."""

import time
from array import array
from collections.abc import Sequence

from kvrouter.journey.journey import Journey
from kvrouter.planes.requests.port import TokenSink
from kvrouter.service.placement import Placement, Placer
from kvrouter.service.silence import SilenceWatch


class Output:
    """Notes what is generated, over all attempts of a request. What it does for a token is done for every
    token of every answer.
    """

    def __init__(self, journey: Journey, placer: Placer, watch: SilenceWatch) -> None:
        self.gaps_s = array("d")
        """Seconds between two arrivals of tokens: 8 bytes each, however long the answer is."""
        self._journey = journey
        self._placer = placer
        self._watch = watch
        self._placement: Placement | None = None
        self._token_s = 0.0
        self._tail_tokens = 0

    def begin(self, placement: Placement) -> None:
        """Another attempt: its prompt's partial block is filled on."""
        self._placement = placement
        self._tail_tokens = placement.prompt.isl_tokens % placement.block_size

    def first(self, token_ids: Sequence[int]) -> None:
        """An attempt's first tokens came: nobody waited for them since the last ones."""
        self._token_s = self._watch.heard_s = time.monotonic()
        self._count(token_ids)

    def more(self, token_ids: Sequence[int]) -> None:
        """More tokens came."""
        now_s = self._watch.heard_s = time.monotonic()
        self.gaps_s.append(now_s - self._token_s)
        self._token_s = now_s
        self._count(token_ids)

    def noting(self, sink: TokenSink) -> TokenSink:
        """Return a sink that notes tokens as :meth:`more` does, and hands them to ``sink``."""
        placement = self._held()
        watch, block_size = self._watch, placement.block_size
        note_gap_s, note_tokens, clock_s = self.gaps_s.append, self._journey.tokens, time.monotonic

        def take(token_ids: Sequence[int]) -> bool:
            now_s = watch.heard_s = clock_s()
            note_gap_s(now_s - self._token_s)
            self._token_s = now_s
            note_tokens(token_ids)
            self._tail_tokens += len(token_ids)
            if self._tail_tokens >= block_size:
                self._count_blocks(placement)
            return sink(token_ids)

        return take

    def _count(self, token_ids: Sequence[int]) -> None:
        placement = self._held()
        self._journey.tokens(token_ids)
        self._tail_tokens += len(token_ids)
        if self._tail_tokens >= placement.block_size:
            self._count_blocks(placement)

    def _count_blocks(self, placement: Placement) -> None:
        """Tell the ledger of each block of output that became full."""
        blocks, self._tail_tokens = divmod(self._tail_tokens, placement.block_size)
        self._placer.output_blocks(placement, blocks)

    def _held(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("tokens came before the request was placed")
        return self._placement
