"""A replay as one self-contained HTML page: without scripts, fonts and other files.

It shows the columns of :mod:`~kvrouter.sim.replay.comparison`, as the terminal does, and draws figures of
:class:`~kvrouter.sim.replay.summary.Summary`. A new figure begins there.
"""
