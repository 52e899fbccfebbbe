"""Matrix products whose rows have the same bits in any company."""
