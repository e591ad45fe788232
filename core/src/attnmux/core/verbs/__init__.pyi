"""The public names for authors of commands, each with its module."""

from attnmux.core.cards.named import offers_named as offers_named
from attnmux.core.cards.named import read_options as read_options
from attnmux.core.cards.proof import Proven as Proven
from attnmux.core.choosing.checking import check as check
from attnmux.core.choosing.checking import standing as standing
from attnmux.core.cli.asking import machine as machine
from attnmux.core.cli.asking import requested as requested
from attnmux.core.cli.run import FiniteRange as FiniteRange
from attnmux.core.cli.run import Run as Run
from attnmux.core.cli.run import common_options as common_options
from attnmux.core.cli.run import writing as writing
from attnmux.core.cli.tables import plain_console as plain_console
from attnmux.core.cli.tables import plain_table as plain_table
from attnmux.core.facts.axes import AXES as AXES
from attnmux.core.facts.axis import Axis as Axis
from attnmux.core.facts.questions import Question as Question
from attnmux.core.facts.records import Device as Device
from attnmux.core.facts.records import Record as Record
from attnmux.core.facts.records import Records as Records
from attnmux.core.find.settings import read_assignments as read_assignments
from attnmux.core.measured.passes import Passes as Passes
from attnmux.core.measured.shipped import Shape as Shape
from attnmux.core.measured.shipped import Shipped as Shipped
from attnmux.core.measured.shipped import Source as Source
from attnmux.core.measured.unverified import Unverified as Unverified
