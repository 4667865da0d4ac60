"""The image, built from its Containerfile and run: `make test-image`."""
