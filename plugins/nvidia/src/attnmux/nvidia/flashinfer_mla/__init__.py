"""flashinfer's MLA kernels: absorbed attention over the pool's pages, from decode to extend.

backend.py    layers, steps and calls; read it first
step.py       once a step: lengths on the host, the pages of each request, what one plan holds
planning.py   the library's wrappers and how each is planned, in graphs too

Its conventions and ours: LSE is a natural logarithm if `run` is asked for one, and -inf with an
output of 0 for a row without keys, as ours; causality counts from the end of the keys. A request
without new rows costs nothing and changes how the kernels tile the others, so plans leave it out.
"""
