"""The router at run time: event ingest, requests, bookings and cordons on one asyncio event loop."""
