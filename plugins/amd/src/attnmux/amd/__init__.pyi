"""The public names, each with its module: emulators stand in for the libraries by them."""

from attnmux.amd.aiter_kernels import AiterKernels as AiterKernels
from attnmux.amd.aiter_mla import AiterMLAKernels as AiterMLAKernels
from attnmux.amd.cards import CARDS as CARDS
from attnmux.amd.wave_kernels import WaveKernels as WaveKernels
from attnmux.amd.wave_kernels import WaveLang as WaveLang
