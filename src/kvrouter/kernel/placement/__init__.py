"""Placement: reads the state, decides, books, moves and releases, without a clock, randomness, tasks or logs.

Every time is an argument (``now_s``, seconds of one monotonic clock), and so is every random draw
(:class:`~kvrouter.kernel.placement.placement.Draw`): equal calls give equal decisions and an equal ledger.
The router passes the event loop's time and random numbers, a simulation its own.
"""
