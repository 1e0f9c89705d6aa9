"""What running engines and training runs write down: profiles, metrics, experiment logs.
They must never decide anything; loops call them as sinks and import none of them."""
