"""Our side: what is measured of kvrouter, called as its service calls it."""
