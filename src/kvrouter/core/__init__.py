"""Types that every package shares: ids, hashes, events, workers, constraints, errors.

Also what every package uses: the HTTP client, clocks, and bounded reading of JSON.
"""
