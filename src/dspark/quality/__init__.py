"""Quality: whether two answers differ by a tie or by a fault.
It must never call a difference harmless without a stated bound."""
