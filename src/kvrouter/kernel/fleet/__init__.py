"""The workers of one model: each worker rank has a dense slot; columns over slots hold its properties."""
