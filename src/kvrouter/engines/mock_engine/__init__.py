"""The mock engine: (now, input) → events. It knows nothing of sockets or asyncio."""
