"""The public names, each with its module: emulators stand in for the libraries by them."""

from attnmux.nvidia.cards import CARDS as CARDS
from attnmux.nvidia.fa3.layers import CHUNKS as CHUNKS
from attnmux.nvidia.fa3.layers import SINKS as SINKS
from attnmux.nvidia.fa3.layers import SINKS_OF_MIXED_DIMS as SINKS_OF_MIXED_DIMS
from attnmux.nvidia.fa3.layers import FA3Kernels as FA3Kernels
from attnmux.nvidia.fa3.ops import fa3_of_flash_attn as fa3_of_flash_attn
from attnmux.nvidia.fa3.ops import fa3_of_vllm as fa3_of_vllm
from attnmux.nvidia.fa4 import FA4Kernels as FA4Kernels
from attnmux.nvidia.flashinfer.planning import FlashInferKernels as FlashInferKernels
from attnmux.nvidia.flashinfer_mla.kernels import from_flashinfer as from_flashinfer
from attnmux.nvidia.latent.cutlass_mla import CutlassMLAKernels as CutlassMLAKernels
from attnmux.nvidia.latent.cutlass_mla import cutlass_of_vllm as cutlass_of_vllm
from attnmux.nvidia.latent.flashmla_kernels import dense_from_flash_mla as dense_from_flash_mla
from attnmux.nvidia.latent.flashmla_kernels import dense_from_sgl_kernel as dense_from_sgl_kernel
from attnmux.nvidia.latent.flashmla_kernels import dense_of_vllm as dense_of_vllm
from attnmux.nvidia.latent.trtllm_mla import TRTLLMMLAKernels as TRTLLMMLAKernels
from attnmux.nvidia.linear.causal_convolutions import CausalConvolutions as CausalConvolutions
from attnmux.nvidia.linear.causal_convolutions import ConvKernels as ConvKernels
from attnmux.nvidia.linear.flashinfer_gdn import GDNKernels as GDNKernels
from attnmux.nvidia.linear.flashinfer_gdn import RecurrenceKernels as RecurrenceKernels
from attnmux.nvidia.trtllm_mha import TRTLLMMHAKernels as TRTLLMMHAKernels
