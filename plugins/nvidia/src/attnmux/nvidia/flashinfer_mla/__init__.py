"""flashinfer's MLA kernels: absorbed attention over the pool's pages, from decode to extend.

backend.py    the contract's methods; read it first
settings.py   what options, request and layers come to
step.py       once a step: lengths on the host, the pages of each request, what one plan holds
planning.py   the library's wrappers and how each is planned, in graphs too
heads.py      head counts that the causal kernels get right
latents.py    where the rows of the cache are: as they lie, widened, or with the call
kernels.py    what is taken from the library; factory.py alone imports it

Its conventions and ours: LSE is a natural logarithm where `run` is asked for one, and -inf with an
output of 0 for a row without keys, as ours; causality counts from the end of the keys. A request
without new rows costs nothing and changes how the kernels tile the others, so plans leave it out.
"""
