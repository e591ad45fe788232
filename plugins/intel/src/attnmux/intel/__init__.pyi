"""The public names, each with its module: emulators stand in for the libraries by them."""

from attnmux.intel.amx_library import AMXKernels as AMXKernels
from attnmux.intel.cards import CARDS as CARDS
from attnmux.intel.vllm_xpu import VLLMXPUKernels as VLLMXPUKernels
from attnmux.intel.xpu_library import XPUKernels as XPUKernels
