"""The gateway over gRPC: `gateway.proto` is the contract.

Every call becomes a request to the gateway's own HTTP application, in the same process and without a socket, so keys,
limits, routing, retries and failover are those of HTTP. Needs `bough[grpc]`.
"""
