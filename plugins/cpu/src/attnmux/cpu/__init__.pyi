"""The public names, each with its module: emulators stand in for the libraries by them."""

from attnmux.cpu.flex_attention import FlexAttentionBackend as FlexAttentionBackend
from attnmux.cpu.flex_attention.kernel import Kernel as Kernel
from attnmux.cpu.flex_attention.kernel import KernelInput as KernelInput
from attnmux.cpu.flex_attention.kernel import KernelSpec as KernelSpec
from attnmux.cpu.flex_attention.kernel import Result as Result
