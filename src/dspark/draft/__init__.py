"""Drafters: whatever guesses the next tokens.
It must never touch the cache of the target, nor know of planning and verification."""
