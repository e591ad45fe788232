"""The vendors' functions in plain torch: same signatures, layouts, in-place and LSE rules.

They stand in for libraries that need hardware, so that an adapter is proven without it.
"""
