"""Attention in plain torch operations: every feature of the contract, on any device.

backend.py      the contract's methods; read it first
metadata.py     once a step: which queries and keys are multiplied together, in tiles
visibility.py   which keys each query sees, by the rule in `attnmux.cpu.steps`
attend.py       every layer: one tile, keys gathered block by block
widening.py     8-bit K and V as what is multiplied
"""

from attnmux.cpu.torch_native.backend import TorchNativeBackend

__all__ = ["TorchNativeBackend"]
