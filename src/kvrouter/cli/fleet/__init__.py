"""``kvrouter fleet``: writes, shows and checks fleet files."""
