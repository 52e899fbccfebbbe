"""The gateway over gRPC: `gateway.proto` is the contract. Needs `bough[grpc]`.

Every call becomes a request to the gateway's HTTP application in the same process, so keys, limits, routing, retries
and failover are those of HTTP.
"""
