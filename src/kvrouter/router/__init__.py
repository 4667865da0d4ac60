"""What runs inside a router: it drives the pure packages with transports and timers."""
