"""The layers, pools, batches and tensors of a case, ready for a backend."""
