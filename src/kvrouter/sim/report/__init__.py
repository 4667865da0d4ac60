"""A replay as one self-contained HTML page: without scripts, fonts and other files."""
