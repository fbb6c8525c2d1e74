"""The cases: one file per chapter of docs/contract.md, for any implementation that has an adapter."""
