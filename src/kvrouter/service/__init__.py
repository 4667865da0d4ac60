"""What runs inside a router: it drives the pure rooms with sockets and timers."""
