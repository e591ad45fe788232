"""flashinfer's MHA and GQA kernels over a paged KV cache.

backend.py    the contract's methods; read it first
groups.py     which layers share a plan, and which keys a plan reads
step.py       once a step: lengths on the host, and the keys as flashinfer wants them
items.py      many items behind one prefix, as the kernels count them
planning.py   wrappers of the library and how each is planned, eager steps
graphs.py     the same for captured graphs: fixed buffers, one wrapper a batch size
caches.py     the pool's memory as the kernels want it
sinks.py      the softmax that kernels of layers with sinks are compiled with
settings.py   what options and request come to
compiling.py  kernels are compiled when a backend is made
staging.py    when the memory that plans are copied from may be written again
states.py     flashinfer's base-2 LSE: to natural, and the merge of two partial results
kernels.py    what is taken from the library; factory.py alone imports it
"""
