"""What a vLLM server said of itself that was asked by nobody here."""

from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.engines.vllm.attach import VllmClient
from kvrouter.engines.vllm.introspect import RankInfo, VllmInfo
from tests.testing.engine_requests import MODEL

R0 = DpRank(0)
STARTED_S = 1.79528047303e09
"""As in the recorded pages."""

VLLM_INFO = VllmInfo(
    version="0.32.0",
    models=(MODEL,),
    adapters=(),
    root="tiny-model",
    context_length=2048,
    prefix_caching=True,
    ranks={R0: RankInfo(32, 200)},
    events={},
    started_s=STARTED_S,
)


def vllm_client() -> VllmClient:
    """How the engine of the recorded pages is asked."""
    return VllmClient(WorkerId(7), VLLM_INFO, model=MODEL)
