"""What comes by a worker's channel counts for that worker's own ranks, and for nobody else's."""

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerRank


class ForeignRank(ProtocolError):
    """A message speaks for a rank that is not its channel's, or answers for one that was not asked about."""

    code = "foreign_rank"


def foreign(rank: WorkerRank, channel: object) -> ForeignRank:
    """Return the error for a message that names ``rank`` and came by ``channel``."""
    return ForeignRank(f"rank {rank} was spoken for by {channel}", param="rank")
