"""KV events of real engines, from frames on a socket to ``core`` events: what all engines share.

::

    frames ──▶ EngineEventStream ──▶ an engine's decode ──▶ EngineBatch ──▶ RankBlocks ──▶ KvEvent
               order, gaps,      its wire, alone        words that      counts, parents,
               replay, restart   (vllm, sglang,         no engine owns  what is not counted
                                 trtllm)
"""
