"""Networks that draft: the same classes in training and in decoding.
They must never know a cache, an engine or a training loop."""
