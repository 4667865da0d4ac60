"""The router at run time: event ingest, placement, requests and cordons on one asyncio event loop."""
