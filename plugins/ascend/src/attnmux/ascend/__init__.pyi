"""The public names, each with its module: emulators stand in for the libraries by them."""

from attnmux.ascend.cards import CARDS as CARDS
from attnmux.ascend.npu_kernels import NPUKernels as NPUKernels
