"""The composition root: a process from its settings; transports and engines are named here."""
