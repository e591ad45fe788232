"""Which devices have graphs, and requests that ask for them."""

from __future__ import annotations

from attnmux.core.facts.platform import Platform
from attnmux.core.facts.request import Request
from attnmux.core.find.plugins import admitted_points

GROUP = "attnmux.graphs"
"""Entry points named after a type of torch device, which make a device's `DeviceGraphs`."""
CAPTURED = frozenset({"decode", "verify", "draft"})


def has_graphs(device_type: str) -> bool:
    """Whether steps on such devices can be captured: CUDA's and HIP's by torch, others if one
    plugin that the configuration admits provides graphs of them."""
    if device_type in ("cuda", "cpu"):
        return device_type == "cuda"
    return len(admitted_points(GROUP, device_type)) == 1


def with_graphs(request: Request, platform: Platform) -> Request:
    """The request with `graph`, which a decision drops if no backend can be captured.

    It is unchanged if it requests graphs itself, has no phase that is captured, or the device has
    no graphs.
    """
    captured = not request.is_linear and CAPTURED.intersection(request.phases)
    if request.graph or not captured or not has_graphs(platform.device_type):
        return request
    return request.replace(origin="platform", graph=True)
