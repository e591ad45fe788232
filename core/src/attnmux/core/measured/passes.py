"""Backends that passed the conformance suite on this machine, until their files change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attnmux.core.cards.card import Offer
from attnmux.core.cards.installed_files import digest
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.values import OptionValue
from attnmux.core.measured.store import Store


class Passes(Store):
    """The file of passes in the user's cache folder: {key: `plugin/name`}."""

    @classmethod
    def in_cache(cls, folder: Path | None) -> Passes:
        """folder: None for none."""
        return cls(Store.of(folder, "passed").path)

    @staticmethod
    def key(
        offer: Offer, platform: Platform, options: Mapping[str, OptionValue], *facts: object
    ) -> str:
        """Names a pass of the suite on the platform; of a part of it, which the facts tell.

        options: those that are set; the others have their defaults. The key changes with the files
        of the plugin, core and the suite, and with the installed libraries.
        """
        return digest(
            offer.card,
            offer.distribution,
            offer.address,
            platform.to_dict(),
            dict(offer.card.complete(options)),
            *facts,
        )
