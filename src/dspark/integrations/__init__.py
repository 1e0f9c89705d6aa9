"""Doors into other people's programs: what lets them use our drafters, and what lets them load our heads.
They must never patch a host, nor change what it would have answered."""
