"""Attaching engines that run already: a process, a line of the fleet file, a labelled pod."""
