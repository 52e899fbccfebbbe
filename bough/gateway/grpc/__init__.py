"""The gateway over gRPC: `gateway.proto` is the contract. Needs `bough[grpc]`."""
