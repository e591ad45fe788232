"""Attention in plain torch operations: every feature of the contract, on any device.

backend.py   the contract's methods; read it first
plan.py      once a step: which keys each query sees, and the tiles that the work is cut into
attend.py    every layer: the attention of one tile
"""

from attnmux.cpu.torch_native.backend import TorchNativeBackend

__all__ = ["TorchNativeBackend"]
