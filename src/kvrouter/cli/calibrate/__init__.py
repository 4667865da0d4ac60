"""``kvrouter calibrate``: fits the timing of mock engines to a measured run of an engine."""
