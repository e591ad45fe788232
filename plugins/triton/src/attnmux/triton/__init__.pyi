"""The public names, each with its module: emulators stand in for the libraries by them."""

from attnmux.triton.attention.backend import TritonBackend as TritonBackend
from attnmux.triton.plugin import TRITON as TRITON
