"""`attnmux backends` and `attnmux platforms`: installed backends, and this machine's devices."""

from __future__ import annotations

from typing import Any

import click

from attnmux.core.cli.here import Backend, backends_here
from attnmux.core.cli.run import Run, common_options
from attnmux.core.facts.errors import AmbiguousPlatform, InvalidInput
from attnmux.core.facts.frozen import plain


@click.command()
@click.option("--all", "every", is_flag=True, help="Those for other hardware too, a row each.")
@common_options
def backends(run: Run, as_json: bool, every: bool) -> None:
    """List the backends of the installed plugins, and what each lacks to run here."""
    settings = run.settings()
    plugins = run.plugins(settings)
    rows = backends_here(plugins.offers(), settings.policy(), run.detect(plugins).platforms)
    if not rows and settings.plugin_filter()[0] is None:
        run.warn(
            "no plugin offers a backend: pip install attnmux-cpu, or that of a device's vendor"
        )
    if as_json:
        run.echo_json(
            {
                "backends": list(map(_described, rows)),
                "failures": plain(plugins.failures),
                "warnings": run.warnings,
            }
        )
        return
    from attnmux.core.cli.render import render_backends  # noqa: PLC0415  # rich is slow to import

    render_backends(rows, every=every)


def _described(backend: Backend) -> dict[str, Any]:
    """A backend as JSON, with its whole card."""
    offer = backend.offer
    return {
        **offer.card.to_dict(),
        "plugin": offer.plugin,
        "distribution": offer.distribution,
        "version": offer.version,
        "proof": backend.proof,
        "here": backend.here,
        "reasons": plain(backend.reasons),
    }


@click.command()
@common_options
def platforms(run: Run, as_json: bool) -> None:
    """List the devices of this machine, and those that no plugin serves."""
    settings = run.settings()
    detection = run.detect(run.plugins(settings))
    try:
        picked = str(detection.pick(settings.platform, named=settings.where("platform")))
    except (AmbiguousPlatform, InvalidInput) as error:
        run.warn(str(error))
        picked = None
    if as_json:
        run.echo_json(
            {
                "platforms": plain(detection.platforms),
                "picked": picked,
                "unserved": plain(detection.unserved),
                "failures": plain(detection.failures),
                "warnings": run.warnings,
            }
        )
        return
    from attnmux.core.cli.render import render_platforms  # noqa: PLC0415  # rich is slow to import

    render_platforms(detection.platforms, picked)
