"""Training of draft heads: the target answers, a head learns to guess the answers, the engine serves the head.
It must never import the engine (who answers is handed in), nor train on data kept for measuring."""
