"""Fitting the timing of mock engines to measured runs, and estimating it from a model and a GPU."""
