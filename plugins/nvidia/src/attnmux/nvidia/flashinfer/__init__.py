"""flashinfer's MHA and GQA kernels over a paged KV cache.

backend.py    the backend: steps and calls; read it first
layers.py     layers as plans and calls need them; which layers share a plan, and its keys
settings.py   kernels and scratch memory, from the options and the request
step.py       once a step: lengths on the host, pages of keys, many items after one prefix
planning.py   the library's wrappers: what each is for, how it is made and planned
graphs.py     the same for captured graphs: fixed buffers, one wrapper a batch size
shared.py     what flashinfer_mla needs too: staging of plans, page indices, the workspace
"""
