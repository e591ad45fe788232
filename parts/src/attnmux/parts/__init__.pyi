"""The public names of attnmux-parts, each with its module."""

from attnmux.parts.draft_attention import DraftKeys as DraftKeys
from attnmux.parts.draft_attention import SeenPrefixes as SeenPrefixes
from attnmux.parts.draft_attention import Trees as Trees
from attnmux.parts.draft_attention import among_drafts as among_drafts
from attnmux.parts.draft_attention import attend_to_drafts as attend_to_drafts
from attnmux.parts.draft_trees import prefix_context as prefix_context
from attnmux.parts.key_parts import KeyPart as KeyPart
from attnmux.parts.page_choice import RequestPages as RequestPages
from attnmux.parts.part_attention import PartAttention as PartAttention
from attnmux.parts.part_attention import add_sinks as add_sinks
from attnmux.parts.part_attention import merge_into as merge_into
from attnmux.parts.picked_blocks import PickedBlocks as PickedBlocks
from attnmux.parts.picked_blocks import PlainBlocks as PlainBlocks
from attnmux.parts.requests import expanded_request as expanded_request
from attnmux.parts.requests import linear_request as linear_request
from attnmux.parts.requests import parts_request as parts_request
from attnmux.parts.requests import prefixes_request as prefixes_request
from attnmux.parts.requests import undrafted_request as undrafted_request
from attnmux.parts.speculation import AcceptedDrafts as AcceptedDrafts
from attnmux.parts.speculation import DraftTree as DraftTree
from attnmux.parts.states import LinearStatePool as LinearStatePool
from attnmux.parts.tree_sampling import AcceptThresholds as AcceptThresholds
from attnmux.parts.tree_sampling import sample_tree_target_only as sample_tree_target_only
