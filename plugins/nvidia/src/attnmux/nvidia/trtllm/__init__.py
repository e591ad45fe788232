"""What the backends over TensorRT-LLM's kernels in flashinfer share.

workspace.py  the scratch memory, whose front has to be zeros
trial.py      the launches that compile the kernels and show whether they run on a device
"""
