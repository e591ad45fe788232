"""`attnmux platforms`: the devices of this machine, and those that no plugin serves."""

from __future__ import annotations

from dataclasses import asdict

import click

from attnmux.core.choosing.find.devices import pick_platform
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import AmbiguousPlatform, InvalidInput


@click.command()
@common_options
@pass_run
def platforms(run: Run, as_json: bool) -> None:
    """List the devices of this machine, and those that no plugin serves."""
    settings = run.settings()
    detection = run.detect(run.plugins(settings))
    try:
        picked = str(pick_platform(detection, settings.platform))
    except (AmbiguousPlatform, InvalidInput) as error:
        run.warn(str(error))
        picked = None
    if as_json:
        echo_json(
            {
                "platforms": [platform.to_dict() for platform in detection.platforms],
                "picked": picked,
                "unserved": [asdict(device) for device in detection.unserved],
                "failures": [asdict(failure) for failure in detection.failures],
                "warnings": run.warnings,
            }
        )
        return
    from attnmux.core.cli.render import render_platforms  # noqa: PLC0415  # rich, off the JSON path

    render_platforms(detection.platforms, picked)
