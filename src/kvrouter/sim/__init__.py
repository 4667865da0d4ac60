"""Offline replay: the router's own decisions and the mock engines, on a simulated clock.

``replay`` runs ``traces`` under the router's rules or those of other routers (``policies``); ``report`` makes
an HTML page of it. ``calibrate`` fits the timing of mock engines, ``past`` analyses recorded requests, and
``worth`` compares transfer policies.
"""
