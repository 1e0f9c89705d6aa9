"""Doors into other people's programs: what lets them use our drafts, lengths and heads, and load what we trained.
They must never use more of a host than it publishes, nor change what it would have answered."""
