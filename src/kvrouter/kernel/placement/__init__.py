"""Placement: reading, decision, booking, move and release, without a clock, chance, tasks or logs.

Every moment is an argument (``now_s``, seconds of one monotonic clock), and so is all that is drawn
(:class:`~kvrouter.kernel.placement.placement.Draw`): the same calls give the same decisions and the same
ledger. The router passes the event loop's time and random numbers; a simulation passes its own.
"""
