"""Serving: what an API says, put into the engine's words and back.
It must never run a model itself, or know how one is drafted for."""
