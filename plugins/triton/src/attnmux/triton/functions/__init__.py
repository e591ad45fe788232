"""Functions on kernels of their own, most of which core looks up by name (`attnmux.kernels`)."""
