"""Which configurations of a kernel the tuner tries, and how a tuned launch writes one down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from attnmux.core import FrozenMapping, InvalidInput
from attnmux.core.plugin import OptionValue
from attnmux.triton.launches import hopper_configs
from attnmux.triton.launches.configs import (
    HOPPER,
    HOPPER_LATENT,
    PORTABLE,
    ConfigEntry,
    ShareConfig,
    TileConfig,
    number_fields,
)

if TYPE_CHECKING:
    from attnmux.core import TunedLaunch
    from attnmux.triton.launches.shapes import Shape

Config = TileConfig | ShareConfig
KINDS: Mapping[str, type[Config]] = {
    "tiles": TileConfig,
    "chains": TileConfig,
    "shares": ShareConfig,
}
"""Kinds of configurations: for prompts, for chains of drafts in tiles, and for few new tokens."""
MAXNREG = "maxnreg"
"""A further compiler option of portable kernels."""
NUMBERS = ("k_dim", "v_dim", "rows", "page", "key_bits")
"""The fields of `TunedLaunch.subject` after the kind: columns of K and of V, query heads of a KV
head times new tokens of a request (for tiles, the heads), the page size of the kernel's table, and
the bits of a value of K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """The configurations of one kernel that may be launched on any device that runs it."""

    bases: tuple[Config, ...] = ()
    """Whole configurations. None for a kernel that takes any numbers: its warps and registers
    follow from these, where kernels that share registers out among their warps may hang."""
    axes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Values of single fields. Each fits every base."""

    def read(self, values: Mapping[str, OptionValue]) -> Config | None:
        """The configuration that `values_of` wrote; None if it is not one of these."""
        for base in self.bases:
            changes: dict[str, Any] = {
                name: values.get(name)
                for name, numbers in self.axes.items()
                if values.get(name) in numbers
            }
            config = replace(base, **changes)
            if values_of(config) == values:
                return config
        return None


def _listed(kernel: str, kind: type[Config]) -> tuple[Config, ...]:
    """A kernel's configurations in `hopper_configs`."""
    every = vars(hopper_configs).values()
    return tuple(config for config in every if isinstance(config, kind) and config.kernel == kernel)


VARIANTS: Mapping[tuple[str, type[Config]], Variants] = {
    (PORTABLE, ShareConfig): Variants(
        axes={
            "block_n": (16, 32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 5, 7),
            "programs_per_unit": (1, 2, 3, 4),
            "least_share": (1, 2, 4),
        }
    ),
    (PORTABLE, TileConfig): Variants(
        axes={
            "block_m": (32, 64, 128),
            "block_n": (16, 32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 5),
        }
    ),
    (HOPPER, ShareConfig): Variants(
        bases=_listed(HOPPER, ShareConfig),
        axes={
            "num_stages": (2, 4, 6),
            "least_share": (1, 2, 4, 8),
            "merged_rows": (16, 32, 64),
        },
    ),
    (HOPPER, TileConfig): Variants(bases=_listed(HOPPER, TileConfig), axes={"num_stages": (2, 3)}),
    (HOPPER_LATENT, ShareConfig): Variants(
        bases=_listed(HOPPER_LATENT, ShareConfig), axes={"least_share": (1, 2, 4, 6, 8)}
    ),
    # Two blocks of the latent fill the shared memory.
    (HOPPER_LATENT, TileConfig): Variants(bases=_listed(HOPPER_LATENT, TileConfig)),
}
"""By kernel and kind of configuration."""


def values_of(config: Config) -> dict[str, OptionValue]:
    """A configuration as `TunedLaunch.values`."""
    numbers = {name: getattr(config, name) for name in sorted(number_fields(type(config)))}
    return {"kernel": config.kernel, **numbers, **config.constants, **config.options}


def config_of(kind: type[Config], values: Mapping[str, OptionValue]) -> Config:
    """The configuration that `values_of` wrote.

    Raises InvalidInput for one that no kernel here takes.
    """
    numbers: dict[str, Any] = {name: value for name, value in values.items() if name != "kernel"}
    name = values.get("kernel", PORTABLE)
    if name != PORTABLE:
        variants = VARIANTS.get((cast("str", name), kind), Variants())
        config = variants.read(values)
        if config is None:
            raise InvalidInput("launch, values", got=values, expected="one that `tune` tries")
        return config
    known = number_fields(kind)
    if numbers.keys() - {MAXNREG} != known or not all(_is_count(n) for n in numbers.values()):
        raise InvalidInput("launch, values", got=values, expected=f"numbers: {sorted(known)}")
    options = {MAXNREG: numbers.pop(MAXNREG)} if MAXNREG in numbers else {}
    return kind(**numbers, options=FrozenMapping(options))


def subject_of(
    kind: str, shape: Shape, *, page_size: int, key_bits: int, queries: int
) -> dict[str, OptionValue]:
    """`TunedLaunch.subject` for a layer and `queries` new tokens of a request."""
    k_dim, v_dim = shape.dims
    rows = shape.group * (1 if kind == "tiles" else queries)
    numbers = (k_dim, v_dim, rows, page_size, key_bits)
    return {"kind": kind, **dict(zip(NUMBERS, numbers, strict=True))}


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def entry_of(tuned: TunedLaunch, arch: str) -> tuple[str, ConfigEntry[Any]]:
    """The kind of a tuned launch, and the table's entry for it.

    Raises InvalidInput for one that no kernel here takes.
    """
    subject = dict(tuned.subject)
    kind = subject.pop("kind", None)
    is_ours = kind in KINDS and subject.keys() == set(NUMBERS)
    if not is_ours or not all(_is_count(n) for n in subject.values()):
        expected = f"kind ({', '.join(KINDS)}) and numbers: {', '.join(NUMBERS)}"
        raise InvalidInput("launch, subject", got=dict(tuned.subject), expected=expected)
    k_dim, v_dim, rows, page, key_bits = (cast("int", subject[name]) for name in NUMBERS)
    config: Any = config_of(KINDS[str(kind)], tuned.values)
    entry = ConfigEntry(
        arch=arch,
        dims=(k_dim, v_dim),
        least_rows=rows,
        page=page,
        key_bits=key_bits,
        config=config,
        measured=f"{tuned.device.name or tuned.device.arch}, {tuned.date:%Y-%m-%d}",
    )
    return str(kind), entry
