"""What the front door costs: CPU a streamed token and CPU a request, next to gateways that pass bytes on."""
