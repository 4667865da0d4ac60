"""The mock engine: (now, input) → events. It uses no sockets and no asyncio."""
