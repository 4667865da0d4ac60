"""What the customs of every engine share, from frames on a wire to ``core`` events.

::

    frames ──▶ BatchFollower ──▶ an engine's decode ──▶ EngineBatch ──▶ RankLedger ──▶ KvEvent
               order, gaps,      its wire, alone        words that      counts, parents,
               replay, restart   (vllm, sglang,         no engine owns  what is not counted
                                 trtllm)
"""
