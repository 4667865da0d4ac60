"""``kvrouter operator``: runs the operator, installs its definitions and converts manifests."""
