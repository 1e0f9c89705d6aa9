"""Benchmarks: variants side by side on the same prompts in the same run.
It must never report a speed without the baseline of the same run."""
