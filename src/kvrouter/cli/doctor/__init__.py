"""``kvrouter doctor``: one reading of a running fleet, and the checks that are made of it.

:mod:`~kvrouter.cli.doctor.diagnosis` asks the router and the engines, and makes the checks. Each is a
function of one :class:`~kvrouter.cli.doctor.reading.Reading`; a file holds those of one theme.
"""
