"""Masks of images in prompts, as the backends that claim them read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardMode, Platform
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import KernelLibrary
from attnmux.cpu.flex_attention import FlexAttentionBackend
from attnmux.cpu.native import NativeBackend
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.nvidia.flashinfer.backend import make as make_flashinfer
from attnmux.nvidia.flashinfer.planning import FlashInferKernels
from attnmux.testing import Case, extend, fake_platform, make_setup, prepare_step, reference
from attnmux.testing.adapters.tests import AdapterWorld
from attnmux.transformers import SequenceState
from attnmux.transformers.requests.batching import mask_of
from attnmux.transformers.requests.prompt_images import PromptImages

FLASHINFER_WORLD = AdapterWorld(
    library=make_flashinfer,
    kernels=KernelLibrary.imported(FlashInferKernels, "attnmux.emulators.nvidia.flashinfer"),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    host_lens=True,
)


def triton(context, options):
    found = pytest.importorskip("triton")
    if not found.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=0")
    return pytest.importorskip("attnmux.triton.attention.backend").TritonBackend(
        context, options, compute_units=3
    )


BACKENDS = {
    "torch_native": TorchNativeBackend,
    "flex_attention": FlexAttentionBackend,
    "native": NativeBackend,
    "triton": triton,
    "flashinfer": FLASHINFER_WORLD.backend,
}


def state_of(length, spans):
    images = PromptImages(
        token_ids=(1,) * length,
        places=torch.tensor([], dtype=torch.int64),
        embeds=torch.zeros(0, 1),
        keys=(1,) * length,
        spans=spans,
    )
    return SequenceState(token_ids=[1] * length, images=images)


@pytest.mark.parametrize(
    ("name", "page_size", "windows"),
    [
        ("flex_attention", 16, (7, None)),  # whose compiler takes a while
        *((name, page, (7, None)) for name in BACKENDS if name[0] != "f" for page in (1, 16)),
        ("flashinfer", 1, (None,)),
        ("flashinfer", 16, (7, None)),
    ],
)
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.turns(3)
def test_tokens_of_a_span_see_each_other(name, page_size, windows):
    """Prompts with spans, from their begin, from inside a span, without any, and decoding ones."""
    lens = ((0, 40), (5, 33), (20, 9), (31, 1))
    spans = (((3, 14), (14, 30)), ((4, 25), (30, 38)), (), ())
    step = extend(*lens, mode=ForwardMode.MIXED)
    case = Case(
        name="spans",
        page_size=page_size,
        steps=(step,),
        windows=windows,
        spec_topk=4,
        dtype="float32",
        head_dim=64,
        v_head_dim=64,
    )
    platform = fake_platform() if name in ("triton", "flashinfer") else probe_cpu()
    setup = make_setup(case, platform, "cpu", seed=3)
    prepared = prepare_step(setup, step, host_lens=True)
    starts, ends = [cached for cached, _ in lens], [cached + new for cached, new in lens]
    states = [state_of(end, each) for end, each in zip(ends, spans, strict=True)]
    causal = prepared.batch
    batch = replace(causal, spec_info=mask_of(states, starts, ends, torch.device("cpu")))
    backend = BACKENDS[name](setup.context, {})
    backend.init_forward_metadata(batch)
    table, pool = setup.context.req_to_token_pool.req_to_token, setup.context.token_to_kv_pool
    for given in prepared.inputs:
        out = backend.forward(given.q, given.k, given.v, given.layer, batch)
        expected, _ = reference.attention(given.q, given.layer, batch, table, pool)
        other, _ = reference.attention(given.q, given.layer, causal, table, pool)
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
        assert (expected - other).abs().max() > 0.3, "the mask matters"


def test_the_mask_of_a_step():
    states = [state_of(6, ((1, 4),)), state_of(3, ())]
    spec = mask_of(states, [0, 2], [5, 3], torch.device("cpu"))
    first = [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert spec.custom_mask[:25].view(5, 5).int().tolist() == first
    assert spec.custom_mask[25:].int().tolist() == [1, 1, 1]
    assert spec.mask_indptr.tolist() == [0, 25, 28]
    assert mask_of(states, [4, 2], [6, 3], torch.device("cpu")) is None, "all of the span has run"
