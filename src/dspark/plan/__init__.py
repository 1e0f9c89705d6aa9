"""Planning: how many tokens to draft and to verify, as a program over tables and floats.
It must never import torch, and is given neither tokens nor tensors."""
