"""The pure core: topology, fleet, index, feed, ledger, routing, placement and the journey of a request.

It reads no clock, draws no random number and opens no socket: moments and draws are arguments. The router
runs it in production; the simulation runs the same code on a simulated clock.
"""
