"""What the front door costs: CPU a streamed token and CPU a request, beside gateways that pass bytes on."""
