"""The public names of attnmux. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.core.aligned_rows import ALIGNMENT as ALIGNMENT
    from attnmux.core.aligned_rows import aligned as aligned
    from attnmux.core.aligned_rows import by_request as by_request
    from attnmux.core.aligned_rows import check_keys_dtype as check_keys_dtype
    from attnmux.core.aligned_rows import is_aligned as is_aligned
    from attnmux.core.aligned_rows import is_writable as is_writable
    from attnmux.core.aligned_rows import store_lse as store_lse
    from attnmux.core.arguments import check_lens as check_lens
    from attnmux.core.arguments import check_picks as check_picks
    from attnmux.core.arguments import check_positive as check_positive
    from attnmux.core.arguments import check_table as check_table
    from attnmux.core.arguments import front as front
    from attnmux.core.backend import AttentionBackend as AttentionBackend
    from attnmux.core.batch import ForwardBatch as ForwardBatch
    from attnmux.core.batch import ForwardMode as ForwardMode
    from attnmux.core.batch import MultiItem as MultiItem
    from attnmux.core.building import build as build
    from attnmux.core.building import make_first as make_first
    from attnmux.core.call import AttentionCall as AttentionCall
    from attnmux.core.chooser import Chooser as Chooser
    from attnmux.core.choosing.ask.layer_group import LayerGroup as LayerGroup
    from attnmux.core.choosing.ask.policy import Policy as Policy
    from attnmux.core.choosing.ask.request import Request as Request
    from attnmux.core.choosing.common.files import replacing as replacing
    from attnmux.core.choosing.common.frozen import FrozenMapping as FrozenMapping
    from attnmux.core.choosing.common.verdict import Reason as Reason
    from attnmux.core.choosing.common.verdict import Verdict as Verdict
    from attnmux.core.choosing.find.devices import Detection as Detection
    from attnmux.core.choosing.find.devices import detect as detect
    from attnmux.core.choosing.find.devices import pick_platform as pick_platform
    from attnmux.core.choosing.find.hooks import hookimpl as hookimpl
    from attnmux.core.choosing.find.plugins import Plugins as Plugins
    from attnmux.core.choosing.find.store import is_own as is_own
    from attnmux.core.choosing.machine.platform import Platform as Platform
    from attnmux.core.choosing.measured.launches import Job as Job
    from attnmux.core.choosing.measured.launches import Trial as Trial
    from attnmux.core.choosing.measured.launches import TunedLaunch as TunedLaunch
    from attnmux.core.choosing.measured.launches import Value as Value
    from attnmux.core.choosing.measured.launches import current_launches as current_launches
    from attnmux.core.choosing.measured.launches import launch_file as launch_file
    from attnmux.core.choosing.measured.measurement import Measurement as Measurement
    from attnmux.core.choosing.measured.measurement import read_measurements as read_measurements
    from attnmux.core.choosing.measured.ranking import accuracy_by as accuracy_by
    from attnmux.core.choosing.measured.ranking import solve_measured as solve_measured
    from attnmux.core.choosing.offer.accuracy import ErrorBound as ErrorBound
    from attnmux.core.choosing.offer.card import LAST_RESORT as LAST_RESORT
    from attnmux.core.choosing.offer.card import TREE_MASKS as TREE_MASKS
    from attnmux.core.choosing.offer.card import BackendCard as BackendCard
    from attnmux.core.choosing.offer.card import Clause as Clause
    from attnmux.core.choosing.offer.card import Offer as Offer
    from attnmux.core.choosing.offer.card import Option as Option
    from attnmux.core.choosing.offer.card import Prior as Prior
    from attnmux.core.choosing.offer.card import TreeMask as TreeMask
    from attnmux.core.choosing.offer.card import when as when
    from attnmux.core.choosing.offer.conditions import ANY as ANY
    from attnmux.core.choosing.offer.conditions import NONE as NONE
    from attnmux.core.choosing.offer.conditions import Condition as Condition
    from attnmux.core.choosing.offer.conditions import anything_but as anything_but
    from attnmux.core.choosing.offer.conditions import at_least as at_least
    from attnmux.core.choosing.offer.conditions import at_most as at_most
    from attnmux.core.choosing.offer.conditions import between as between
    from attnmux.core.choosing.offer.conditions import emulated as emulated
    from attnmux.core.choosing.offer.conditions import includes as includes
    from attnmux.core.choosing.offer.conditions import multiple_of as multiple_of
    from attnmux.core.choosing.offer.conditions import one_of as one_of
    from attnmux.core.choosing.offer.conditions import runtimes as runtimes
    from attnmux.core.choosing.offer.conditions import versions as versions
    from attnmux.core.choosing.offer.libraries import installed_version as installed_version
    from attnmux.core.choosing.offer.verified import Verified as Verified
    from attnmux.core.choosing.solver import solve as solve
    from attnmux.core.choosing.tell.choice import Choice as Choice
    from attnmux.core.choosing.tell.decision import Decision as Decision
    from attnmux.core.chosen_pages import pages_of_budget as pages_of_budget
    from attnmux.core.chosen_pages import sparse_context as sparse_context
    from attnmux.core.chunk_pieces import Pieces as Pieces
    from attnmux.core.chunk_pieces import most_pieces as most_pieces
    from attnmux.core.chunked_prefix import ChunkedPrefixBackend as ChunkedPrefixBackend
    from attnmux.core.chunked_prefix import expanded_context as expanded_context
    from attnmux.core.composites import BatchSizeAttnBackend as BatchSizeAttnBackend
    from attnmux.core.composites import DispatchingBackend as DispatchingBackend
    from attnmux.core.composites import HybridAttnBackend as HybridAttnBackend
    from attnmux.core.context import BackendContext as BackendContext
    from attnmux.core.decode_steps import DecodeBuffers as DecodeBuffers
    from attnmux.core.decode_steps import DecodeStep as DecodeStep
    from attnmux.core.decode_steps import KeyLens as KeyLens
    from attnmux.core.decode_steps import with_lens as with_lens
    from attnmux.core.draft_paths import DraftCandidates as DraftCandidates
    from attnmux.core.draft_paths import DraftPaths as DraftPaths
    from attnmux.core.draft_paths import likeliest as likeliest
    from attnmux.core.draft_steps import MultiStepDraftBackend as MultiStepDraftBackend
    from attnmux.core.draft_trees import TreeAttnBackend as TreeAttnBackend
    from attnmux.core.draft_trees import prefix_context as prefix_context
    from attnmux.core.dtypes import dtype_name as dtype_name
    from attnmux.core.dtypes import torch_dtype as torch_dtype
    from attnmux.core.errors import AmbiguousPlatform as AmbiguousPlatform
    from attnmux.core.errors import AttnmuxError as AttnmuxError
    from attnmux.core.errors import BackendFailed as BackendFailed
    from attnmux.core.errors import GraphUnsupported as GraphUnsupported
    from attnmux.core.errors import GraphViolation as GraphViolation
    from attnmux.core.errors import InvalidInput as InvalidInput
    from attnmux.core.errors import NoBackend as NoBackend
    from attnmux.core.errors import PluginError as PluginError
    from attnmux.core.errors import PoolExhausted as PoolExhausted
    from attnmux.core.errors import RankFailed as RankFailed
    from attnmux.core.errors import RanksDiffer as RanksDiffer
    from attnmux.core.errors import SettingsError as SettingsError
    from attnmux.core.errors import UnknownBackend as UnknownBackend
    from attnmux.core.errors import in_brief as in_brief
    from attnmux.core.expanded_parts import Part as Part
    from attnmux.core.expanded_parts import parts_of as parts_of
    from attnmux.core.expanded_parts import prefix_chunks as prefix_chunks
    from attnmux.core.factories import make_backend as make_backend
    from attnmux.core.graph.config import GraphConfig as GraphConfig
    from attnmux.core.graph.config import ModelInput as ModelInput
    from attnmux.core.graph.config import graph_batch_sizes as graph_batch_sizes
    from attnmux.core.graph.devices import DeviceGraphs as DeviceGraphs
    from attnmux.core.graph.devices import device_graphs as device_graphs
    from attnmux.core.graph.runner import GraphRunner as GraphRunner
    from attnmux.core.graph.together import CapturingRanks as CapturingRanks
    from attnmux.core.indices._segments import segment_of_place as segment_of_place
    from attnmux.core.indices.keys import kv_indices as kv_indices
    from attnmux.core.indices.keys import page_table as page_table
    from attnmux.core.indices.keys import table_width as table_width
    from attnmux.core.indices.local import KVView as KVView
    from attnmux.core.indices.local import window_view as window_view
    from attnmux.core.indices.ragged import cu_seqlens as cu_seqlens
    from attnmux.core.indices.ragged import extend_positions as extend_positions
    from attnmux.core.indices.ragged import kv_indptr as kv_indptr
    from attnmux.core.indices.ragged import kv_last_page_len as kv_last_page_len
    from attnmux.core.indices.ragged import mask_indptr as mask_indptr
    from attnmux.core.indices.ragged import uniform_indptr as uniform_indptr
    from attnmux.core.indices.ragged import verify_kv_lens as verify_kv_lens
    from attnmux.core.indices.topk import token_rows as token_rows
    from attnmux.core.indices.topk import topk_slots as topk_slots
    from attnmux.core.installed import load_plugins as load_plugins
    from attnmux.core.key_picks import KeyPicker as KeyPicker
    from attnmux.core.key_picks import ScoresKeys as ScoresKeys
    from attnmux.core.kv.allocator import PagedAllocator as PagedAllocator
    from attnmux.core.kv.allocator import TokenAllocator as TokenAllocator
    from attnmux.core.kv.foreign import ForeignKVPool as ForeignKVPool
    from attnmux.core.kv.foreign import ForeignMLAPool as ForeignMLAPool
    from attnmux.core.kv.foreign import ForeignRequestTable as ForeignRequestTable
    from attnmux.core.kv.index_pool import IndexKPool as IndexKPool
    from attnmux.core.kv.index_pool import IndexRows as IndexRows
    from attnmux.core.kv.joined import JoinedKVPool as JoinedKVPool
    from attnmux.core.kv.linear_states import LinearStatePool as LinearStatePool
    from attnmux.core.kv.memory import free_host_memory as free_host_memory
    from attnmux.core.kv.memory import tokens_in_budget as tokens_in_budget
    from attnmux.core.kv.pool import KVPool as KVPool
    from attnmux.core.kv.pool import check_loc as check_loc
    from attnmux.core.kv.pool import check_rows as check_rows
    from attnmux.core.kv.pool import word_dtype as word_dtype
    from attnmux.core.kv.prefix_node import PrefixNode as PrefixNode
    from attnmux.core.kv.prefix_tree import PrefixMatch as PrefixMatch
    from attnmux.core.kv.prefix_tree import PrefixTree as PrefixTree
    from attnmux.core.kv.quantise import ACTIVATION_DTYPES as ACTIVATION_DTYPES
    from attnmux.core.kv.quantise import quantise as quantise
    from attnmux.core.kv.request_table import BlockTable as BlockTable
    from attnmux.core.kv.request_table import ReqToTokenPool as ReqToTokenPool
    from attnmux.core.kv.request_table import RequestTable as RequestTable
    from attnmux.core.kv.rows import gather_rows as gather_rows
    from attnmux.core.kv.rows import scatter_rows as scatter_rows
    from attnmux.core.kv.swa import SWAKVPool as SWAKVPool
    from attnmux.core.kv.token_pools import MHATokenToKVPool as MHATokenToKVPool
    from attnmux.core.kv.token_pools import MLATokenToKVPool as MLATokenToKVPool
    from attnmux.core.kv.writer import KVWriter as KVWriter
    from attnmux.core.latent import UpProjection as UpProjection
    from attnmux.core.latent_rows import LATENT_DIM as LATENT_DIM
    from attnmux.core.latent_rows import ROPE_DIM as ROPE_DIM
    from attnmux.core.latent_rows import check_latent as check_latent
    from attnmux.core.latent_rows import check_plain as check_plain
    from attnmux.core.latent_rows import joined as joined
    from attnmux.core.latent_rows import latent_layers as latent_layers
    from attnmux.core.latent_rows import latent_pages as latent_pages
    from attnmux.core.latent_rows import rotary as rotary
    from attnmux.core.layer import LayerSpec as LayerSpec
    from attnmux.core.layer_groups import LayerGroupsBackend as LayerGroupsBackend
    from attnmux.core.library import KernelLibrary as KernelLibrary
    from attnmux.core.library import LibraryBackend as LibraryBackend
    from attnmux.core.library import filled as filled
    from attnmux.core.library import imported as imported
    from attnmux.core.library import trying as trying
    from attnmux.core.linear_backend import LinearAttentionBackend as LinearAttentionBackend
    from attnmux.core.linear_call import ConvCall as ConvCall
    from attnmux.core.linear_call import LinearCall as LinearCall
    from attnmux.core.linear_hybrid import HybridLinearAttnBackend as HybridLinearAttnBackend
    from attnmux.core.linear_layer import L2_EPS as L2_EPS
    from attnmux.core.linear_layer import LinearKind as LinearKind
    from attnmux.core.linear_layer import LinearLayerSpec as LinearLayerSpec
    from attnmux.core.local_attention import LocalAttnBackend as LocalAttnBackend
    from attnmux.core.local_attention import with_virtual_requests as with_virtual_requests
    from attnmux.core.mask_forms import with_mask_forms as with_mask_forms
    from attnmux.core.ngram import NgramIndex as NgramIndex
    from attnmux.core.op import attention_with_output as attention_with_output
    from attnmux.core.op import current_forward_context as current_forward_context
    from attnmux.core.op import forward_context as forward_context
    from attnmux.core.op import has_forward_context as has_forward_context
    from attnmux.core.page_bounds import PageBounds as PageBounds
    from attnmux.core.page_choice import FIRST_PAGES as FIRST_PAGES
    from attnmux.core.page_choice import LAST_PAGES as LAST_PAGES
    from attnmux.core.page_choice import KVBuffers as KVBuffers
    from attnmux.core.page_choice import PageKernels as PageKernels
    from attnmux.core.page_choice import PlainPages as PlainPages
    from attnmux.core.page_choice import RequestPages as RequestPages
    from attnmux.core.page_choice import bound_products as bound_products
    from attnmux.core.page_tables import KeyGroup as KeyGroup
    from attnmux.core.page_tables import Keys as Keys
    from attnmux.core.page_tables import PageTables as PageTables
    from attnmux.core.page_tables import fixed_buffers as fixed_buffers
    from attnmux.core.part_attention import MOST_LANES as MOST_LANES
    from attnmux.core.part_attention import PartAttention as PartAttention
    from attnmux.core.part_attention import is_mergeable as is_mergeable
    from attnmux.core.part_attention import merge_into as merge_into
    from attnmux.core.part_attention import part_context as part_context
    from attnmux.core.pool_views import FP8 as FP8
    from attnmux.core.pool_views import SIXTEEN_BITS as SIXTEEN_BITS
    from attnmux.core.pool_views import check_bfloat16_or_fp8 as check_bfloat16_or_fp8
    from attnmux.core.pool_views import check_own_or_fp8 as check_own_or_fp8
    from attnmux.core.pool_views import check_page_size as check_page_size
    from attnmux.core.pool_views import check_sixteen_bits as check_sixteen_bits
    from attnmux.core.pool_views import kv_pages as kv_pages
    from attnmux.core.pool_views import not_in_pool as not_in_pool
    from attnmux.core.radix_attention import RadixAttention as RadixAttention
    from attnmux.core.ranks import Pending as Pending
    from attnmux.core.ranks import RankGroup as RankGroup
    from attnmux.core.ranks_measuring import check_same_libraries as check_same_libraries
    from attnmux.core.ranks_measuring import shared_launches as shared_launches
    from attnmux.core.ranks_measuring import shared_trials as shared_trials
    from attnmux.core.ranks_measuring import together_on as together_on
    from attnmux.core.rehearsal import rehearse as rehearse
    from attnmux.core.rehearsal import smallest_batches as smallest_batches
    from attnmux.core.settings import Settings as Settings
    from attnmux.core.shared_kernels import shared_kernel as shared_kernel
    from attnmux.core.shared_kernels import with_shared_kernels as with_shared_kernels
    from attnmux.core.sparse_pages import SparseAttnBackend as SparseAttnBackend
    from attnmux.core.spec import SpecInput as SpecInput
    from attnmux.core.speculation import AcceptedDrafts as AcceptedDrafts
    from attnmux.core.speculation import DraftTree as DraftTree
    from attnmux.core.speculation import check_num_nodes as check_num_nodes
    from attnmux.core.speculation import organize_draft_results as organize_draft_results
    from attnmux.core.speculation import verify_tree_greedy as verify_tree_greedy
    from attnmux.core.steps import NO_OPTIONS as NO_OPTIONS
    from attnmux.core.tree_kernels import TreeKernels as TreeKernels
    from attnmux.core.tree_masks import check_trees as check_trees
    from attnmux.core.tree_masks import draft_depths as draft_depths
    from attnmux.core.tree_masks import limited_drafts as limited_drafts
    from attnmux.core.tree_masks import masks_drafts as masks_drafts
    from attnmux.core.tree_masks import pack_visible as pack_visible
    from attnmux.core.tree_masks import tree_mask_of as tree_mask_of
    from attnmux.core.tree_masks import unpack_visible as unpack_visible
    from attnmux.core.tree_masks import visible_drafts as visible_drafts
    from attnmux.core.tree_sampling import AcceptThresholds as AcceptThresholds
    from attnmux.core.tree_sampling import check_sampling as check_sampling
    from attnmux.core.tree_sampling import sample_tree_target_only as sample_tree_target_only
    from attnmux.core.tree_steps import among_drafts as among_drafts
    from attnmux.core.tree_steps import as_heads as as_heads
    from attnmux.core.tree_steps import as_tokens as as_tokens
    from attnmux.core.two_batches import TboAttnBackend as TboAttnBackend
    from attnmux.core.two_batches import with_halves as with_halves
    from attnmux.core.workspace import Workspace as Workspace

_NAMES_BY_MODULE = {
    "arguments": (
        "check_lens",
        "check_picks",
        "check_positive",
        "check_table",
        "front",
    ),
    "backend": ("AttentionBackend",),
    "batch": (
        "ForwardBatch",
        "ForwardMode",
        "MultiItem",
    ),
    "building": (
        "build",
        "make_first",
    ),
    "call": ("AttentionCall",),
    "chooser": ("Chooser",),
    "choosing.ask.layer_group": ("LayerGroup",),
    "choosing.ask.policy": ("Policy",),
    "choosing.ask.request": ("Request",),
    "choosing.common.files": ("replacing",),
    "choosing.common.frozen": ("FrozenMapping",),
    "choosing.common.verdict": (
        "Reason",
        "Verdict",
    ),
    "choosing.find.devices": (
        "Detection",
        "detect",
        "pick_platform",
    ),
    "choosing.find.hooks": ("hookimpl",),
    "choosing.find.plugins": ("Plugins",),
    "choosing.find.store": ("is_own",),
    "choosing.machine.platform": ("Platform",),
    "choosing.measured.ranking": (
        "accuracy_by",
        "solve_measured",
    ),
    "choosing.measured.launches": (
        "Job",
        "Trial",
        "TunedLaunch",
        "Value",
        "current_launches",
        "launch_file",
    ),
    "choosing.measured.measurement": (
        "Measurement",
        "read_measurements",
    ),
    "choosing.offer.accuracy": ("ErrorBound",),
    "choosing.offer.card": (
        "BackendCard",
        "Clause",
        "LAST_RESORT",
        "Offer",
        "Option",
        "Prior",
        "TREE_MASKS",
        "TreeMask",
        "when",
    ),
    "choosing.offer.conditions": (
        "ANY",
        "Condition",
        "NONE",
        "anything_but",
        "at_least",
        "at_most",
        "between",
        "emulated",
        "includes",
        "multiple_of",
        "one_of",
        "runtimes",
        "versions",
    ),
    "choosing.offer.libraries": ("installed_version",),
    "choosing.offer.verified": ("Verified",),
    "choosing.solver": ("solve",),
    "choosing.tell.choice": ("Choice",),
    "choosing.tell.decision": ("Decision",),
    "chunk_pieces": (
        "Pieces",
        "most_pieces",
    ),
    "chunked_prefix": (
        "ChunkedPrefixBackend",
        "expanded_context",
    ),
    "composites": (
        "BatchSizeAttnBackend",
        "DispatchingBackend",
        "HybridAttnBackend",
    ),
    "context": ("BackendContext",),
    "decode_steps": (
        "DecodeBuffers",
        "DecodeStep",
        "KeyLens",
        "with_lens",
    ),
    "draft_paths": (
        "DraftCandidates",
        "DraftPaths",
        "likeliest",
    ),
    "draft_steps": ("MultiStepDraftBackend",),
    "draft_trees": (
        "TreeAttnBackend",
        "prefix_context",
    ),
    "dtypes": (
        "dtype_name",
        "torch_dtype",
    ),
    "errors": (
        "AmbiguousPlatform",
        "AttnmuxError",
        "BackendFailed",
        "GraphUnsupported",
        "GraphViolation",
        "InvalidInput",
        "NoBackend",
        "PluginError",
        "PoolExhausted",
        "RankFailed",
        "RanksDiffer",
        "SettingsError",
        "UnknownBackend",
        "in_brief",
    ),
    "expanded_parts": (
        "Part",
        "parts_of",
        "prefix_chunks",
    ),
    "factories": ("make_backend",),
    "graph.config": (
        "GraphConfig",
        "ModelInput",
        "graph_batch_sizes",
    ),
    "graph.devices": (
        "DeviceGraphs",
        "device_graphs",
    ),
    "graph.runner": ("GraphRunner",),
    "graph.together": ("CapturingRanks",),
    "indices._segments": ("segment_of_place",),
    "indices.keys": (
        "kv_indices",
        "page_table",
        "table_width",
    ),
    "indices.local": (
        "KVView",
        "window_view",
    ),
    "indices.ragged": (
        "cu_seqlens",
        "extend_positions",
        "kv_indptr",
        "kv_last_page_len",
        "mask_indptr",
        "uniform_indptr",
        "verify_kv_lens",
    ),
    "indices.topk": (
        "token_rows",
        "topk_slots",
    ),
    "installed": ("load_plugins",),
    "key_picks": ("KeyPicker", "ScoresKeys"),
    "kv.allocator": (
        "PagedAllocator",
        "TokenAllocator",
    ),
    "kv.foreign": (
        "ForeignKVPool",
        "ForeignMLAPool",
        "ForeignRequestTable",
    ),
    "kv.memory": (
        "free_host_memory",
        "tokens_in_budget",
    ),
    "kv.pool": (
        "KVPool",
        "check_loc",
        "check_rows",
        "word_dtype",
    ),
    "kv.prefix_node": ("PrefixNode",),
    "kv.prefix_tree": (
        "PrefixMatch",
        "PrefixTree",
    ),
    "kv.quantise": (
        "ACTIVATION_DTYPES",
        "quantise",
    ),
    "kv.request_table": (
        "BlockTable",
        "ReqToTokenPool",
        "RequestTable",
    ),
    "kv.index_pool": ("IndexKPool", "IndexRows"),
    "kv.joined": ("JoinedKVPool",),
    "kv.linear_states": ("LinearStatePool",),
    "kv.rows": (
        "gather_rows",
        "scatter_rows",
    ),
    "kv.swa": ("SWAKVPool",),
    "kv.token_pools": (
        "MHATokenToKVPool",
        "MLATokenToKVPool",
    ),
    "kv.writer": ("KVWriter",),
    "latent": ("UpProjection",),
    "layer": ("LayerSpec",),
    "layer_groups": ("LayerGroupsBackend",),
    "linear_backend": ("LinearAttentionBackend",),
    "linear_call": (
        "ConvCall",
        "LinearCall",
    ),
    "linear_hybrid": ("HybridLinearAttnBackend",),
    "linear_layer": (
        "L2_EPS",
        "LinearKind",
        "LinearLayerSpec",
    ),
    "latent_rows": (
        "LATENT_DIM",
        "ROPE_DIM",
        "check_latent",
        "check_plain",
        "joined",
        "latent_layers",
        "latent_pages",
        "rotary",
    ),
    "page_tables": (
        "KeyGroup",
        "Keys",
        "PageTables",
        "fixed_buffers",
    ),
    "part_attention": (
        "MOST_LANES",
        "PartAttention",
        "is_mergeable",
        "merge_into",
        "part_context",
    ),
    "pool_views": (
        "FP8",
        "SIXTEEN_BITS",
        "check_bfloat16_or_fp8",
        "check_own_or_fp8",
        "check_page_size",
        "check_sixteen_bits",
        "kv_pages",
        "not_in_pool",
    ),
    "aligned_rows": (
        "ALIGNMENT",
        "aligned",
        "by_request",
        "check_keys_dtype",
        "is_aligned",
        "is_writable",
        "store_lse",
    ),
    "library": (
        "KernelLibrary",
        "LibraryBackend",
        "filled",
        "imported",
        "trying",
    ),
    "ngram": ("NgramIndex",),
    "local_attention": (
        "LocalAttnBackend",
        "with_virtual_requests",
    ),
    "mask_forms": ("with_mask_forms",),
    "op": (
        "attention_with_output",
        "current_forward_context",
        "has_forward_context",
        "forward_context",
    ),
    "radix_attention": ("RadixAttention",),
    "ranks": (
        "Pending",
        "RankGroup",
    ),
    "ranks_measuring": (
        "check_same_libraries",
        "shared_launches",
        "shared_trials",
        "together_on",
    ),
    "rehearsal": (
        "rehearse",
        "smallest_batches",
    ),
    "settings": ("Settings",),
    "page_bounds": ("PageBounds",),
    "page_choice": (
        "FIRST_PAGES",
        "KVBuffers",
        "LAST_PAGES",
        "PageKernels",
        "PlainPages",
        "RequestPages",
        "bound_products",
    ),
    "chosen_pages": ("pages_of_budget", "sparse_context"),
    "sparse_pages": ("SparseAttnBackend",),
    "spec": ("SpecInput",),
    "shared_kernels": (
        "shared_kernel",
        "with_shared_kernels",
    ),
    "speculation": (
        "AcceptedDrafts",
        "DraftTree",
        "check_num_nodes",
        "organize_draft_results",
        "verify_tree_greedy",
    ),
    "steps": ("NO_OPTIONS",),
    "tree_kernels": ("TreeKernels",),
    "tree_masks": (
        "check_trees",
        "draft_depths",
        "limited_drafts",
        "masks_drafts",
        "pack_visible",
        "tree_mask_of",
        "unpack_visible",
        "visible_drafts",
    ),
    "tree_sampling": (
        "AcceptThresholds",
        "check_sampling",
        "sample_tree_target_only",
    ),
    "tree_steps": (
        "among_drafts",
        "as_heads",
        "as_tokens",
    ),
    "two_batches": (
        "TboAttnBackend",
        "with_halves",
    ),
    "workspace": ("Workspace",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import the module of a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415  # the command needs no name of these

    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
