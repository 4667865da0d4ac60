"""KV events of real engines, from frames on a socket to ``core`` events: the part that all engines share.

::

    frames ──▶ EngineEventStream ──▶ an engine's decode ──▶ EngineBatch ──▶ RankBlocks ──▶ KvEvent
               order, gaps,          its encoding only      in a form       counts, parents,
               replay, restart       (vllm, sglang,         for all         skipped events
                                     trtllm)                engines
"""
