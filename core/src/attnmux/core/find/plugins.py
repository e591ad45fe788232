"""The installed plugins that the environment and the configuration file admit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from pathlib import Path

from attnmux.core.cards.advisory import Advisory
from attnmux.core.cards.card import BackendCard, Offer
from attnmux.core.cards.installed_files import installed
from attnmux.core.cards.named import KNOWN_BACKENDS
from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import AttnmuxError, InvalidInput
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.libraries import canonical, entry_points, identity, parsed_requirement
from attnmux.core.facts.policy import Policy
from attnmux.core.find.devices import Detection, survey
from attnmux.core.find.manager import manager
from attnmux.core.find.plugin import Plugin, PluginFailure, failure_of
from attnmux.core.find.settings import SECONDS, Settings

GROUP = "attnmux"
"""The entry-point group; an entry point's name is the plugin's, its value the plugin module."""
OWN = "attnmux-"
"""If `attnmux-NAME` is installed, the plugin name NAME is its own."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins that work, and why the others do not."""

    installed = staticmethod(installed)

    loaded: tuple[Plugin, ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    seconds: float = SECONDS
    """How long a probe may take."""
    policy: Policy = field(default_factory=Policy)
    """Which backends the configuration admits."""
    variables: Mapping[str, str] = field(default_factory=FrozenMapping)
    """The environment's variables that hide devices."""
    shipped: bool = True
    """Whether offers have the figures that plugins carry."""
    ignored: frozenset[str] = frozenset()
    """Ids of advisories that refuse nothing."""
    named: str | None = None
    """The configured platform, which may describe a device that no plugin finds."""

    @classmethod
    def load(
        cls,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] = (),
        *,
        settings: Settings | None = None,
    ) -> Plugins:
        """The installed plugins with their cards. Each is imported once in a process.

        `allow` (None: all) and `deny` name distributions. The lists of `settings` (default: the
        environment's and the configuration file's) hold as well, and so do its lists of backends:
        the offers that they leave out never win. A plugin that is left out is not imported. A
        plugin that raises, or shares its name with another, is a failure in the result, never an
        exception.

        Raises InvalidInput for one text instead of several names, SettingsError for settings that
        cannot be read.
        """
        settings = settings or Settings.load()
        allow = None if allow is None else several_names("allow", allow)
        configured, denied = settings.plugin_filter()
        if configured is not None:
            known = configured if allow is None else allow
            allow = tuple(name for name in known if is_admitted(name, configured, ()))
        admitted_plugins = find_plugins(allow, (*several_names("deny", deny), *denied))
        plugins = [
            plugin if plugin.failures else manager().load(plugin) for plugin in admitted_plugins
        ]
        return cls(
            loaded=tuple(plugin for plugin in plugins if not plugin.failures),
            failures=tuple(failure for plugin in plugins for failure in plugin.failures),
            seconds=settings.plugin_seconds,
            policy=Policy(allow=settings.allow_backends, deny=settings.deny_backends),
            variables=Settings.device_variables(),
            shipped=not settings.no_shipped_figures,
            ignored=frozenset(settings.ignore_advisories),
            named=settings.platform,
        )

    def offers(self) -> tuple[Offer, ...]:
        """Every card with the plugin that brought it."""
        brought = [(plugin, card) for plugin in self.loaded for card in plugin.cards]
        owners = {name: {distribution} for name, distribution in KNOWN_BACKENDS.items()}
        for plugin, card in brought:
            if card.name not in KNOWN_BACKENDS:
                owners.setdefault(card.name, set()).add(plugin.distribution)
        findings, offers = self.advisories(), []
        for plugin, card in brought:
            names = (card.name, *card.aliases)
            foreign = {
                n for n in names if plugin.distribution not in owners.get(n, {plugin.distribution})
            }
            offer = Offer(
                card=card,
                plugin=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                foreign=frozenset(foreign),
                figures=plugin.figures if self.shipped else (),
                advisories=_about(card, findings),
                ignored=self.ignored,
            )
            admitted = self.policy.admits(offer.names, offer.claims)
            offers.append(offer if admitted else replace(offer, admitted=False))
        return tuple(offers)

    def advisories(self) -> tuple[Advisory, ...]:
        """The findings of all plugins by id; of two with one id, the first plugin's counts."""
        found = (each for plugin in self.loaded for each in plugin.advisories)
        by_id: dict[str, Advisory] = {}
        for each in found:
            by_id.setdefault(each.id, each)
        return tuple(by_id[name] for name in sorted(by_id))

    def detect(self, *, root: Path = Path("/")) -> Detection:
        """The devices that the plugins find, and those that no plugin reports.

        One child process asks all probes. One that raises, exits, crashes, or gives no answer
        within `seconds` is a failure in the result. `root` contains /dev and /sys.
        """
        from attnmux.core.find.probes import probe  # noqa: PLC0415  # not asked about other machines

        probed = probe([plugin for plugin in self.loaded if plugin.probes], self.seconds)
        return survey(
            (platform for plugin in probed for platform in plugin.platforms),
            loaded={plugin.distribution for plugin in self.loaded},
            failures=[
                *self.failures,
                *(failure for plugin in probed for failure in plugin.failures),
            ],
            variables=self.variables,
            named=self.named,
            root=root,
        )


def _about(card: BackendCard, findings: Sequence[Advisory]) -> tuple[Advisory, ...]:
    """The findings about the libraries of a card, its builds' too."""
    if not findings:
        return ()
    builds = (parsed_requirement(text).name for one in card.builds for text in one.requires)
    names = {canonical(name) for name in (*card.libraries(), *builds)}
    return tuple(each for each in findings if canonical(each.library) in names)


def find_plugins(allow: Iterable[str] | None = None, deny: Iterable[str] = ()) -> list[Plugin]:
    """The installed plugins that are admitted. Imports none; those that cannot be used have a
    failure.

    `allow` names distributions, and `deny` names distributions or plugins (see `is_admitted`). A
    plugin name that two distributions use is a failure, except of `attnmux-NAME`, to which NAME
    belongs. Raises InvalidInput for one text instead of several names.
    """
    allowed = None if allow is None else several_names("allow", allow)
    denied = several_names("deny", deny)
    points, unreadable = entry_points(GROUP)
    plugins = [
        plugin
        for plugin in (Plugin(point, *identity(point.dist)) for point in points)
        if is_admitted(plugin.distribution, allowed, denied)
        and is_admitted(plugin.name, None, denied)
    ]
    plugins.sort(key=lambda plugin: plugin.key)
    found = []
    for name, error in unreadable:
        nameless = Plugin(EntryPoint(name, "", GROUP), name)
        found.append(nameless._replace(failures=(failure_of(nameless, "load", error),)))
    for plugin in plugins:
        sharing = sorted(other.distribution for other in plugins if other.name == plugin.name)
        owner = OWN + plugin.name
        if len(sharing) > 1 and (plugin.distribution != owner or sharing.count(owner) > 1):
            error = AttnmuxError(
                f"the plugin name {plugin.name!r} belongs to {' and '.join(sharing)}: "
                "deny one of the distributions (deny_plugins)"
            )
            plugin = plugin._replace(failures=(failure_of(plugin, "load", error),))
        found.append(plugin)
    return found


def admitted_points(group: str, name: str) -> dict[str, EntryPoint]:
    """The group's entry points of that name, by distribution, of plugins that the configuration
    admits."""
    points = [point for point in entry_points(group)[0] if point.name == name]
    if not points:
        return {}
    admitted = {plugin.distribution for plugin in Plugins.load().loaded}
    by_owner = {identity(point.dist)[0]: point for point in points}
    return {owner: point for owner, point in sorted(by_owner.items()) if owner in admitted}


def several_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """`names`, read once. Raises InvalidInput for one text instead of several names."""
    if isinstance(names, str):
        raise InvalidInput(argument, got=repr(names), expected="several names, in a list")
    return tuple(names)


def is_admitted(distribution: str, allow: Iterable[str] | None, deny: Iterable[str]) -> bool:
    """Whether the lists admit a distribution. In them, NAME also means `attnmux-NAME`."""
    name = canonical(distribution)
    names = {name, name.removeprefix(OWN)}
    allowed = allow is None or not names.isdisjoint(map(canonical, allow))
    return allowed and names.isdisjoint(map(canonical, deny))


def unknown_plugins(names: Iterable[str], *, denied: bool) -> dict[str, str]:
    """The names that match no installed plugin, each with the name that was probably meant, or with
    an empty text. denied: whether names of plugins match too, as they do if they are denied."""
    points, _ = entry_points(GROUP)
    owners = {point.name: identity(point.dist)[0] for point in points}
    return {
        name: owners.get(name) or nearest(name, sorted({*owners, *owners.values()}))
        for name in names
        if not any(is_admitted(owner, (name,), ()) for owner in owners.values())
        and not (denied and name in owners)
    }
