"""Verification: what of a draft is kept, and the token that follows it.
It must never know who drafted, why so many tokens were planned, or what they cost."""
