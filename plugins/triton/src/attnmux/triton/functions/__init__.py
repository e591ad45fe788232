"""Functions on kernels of their own. Core looks most of them up by name (`attnmux.kernels`)."""
