"""Models: loading, the cache of keys and values, and the packed forward pass.
It must never know what a draft, a request or a step is."""
