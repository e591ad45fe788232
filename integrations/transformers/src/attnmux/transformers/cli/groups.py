"""The help of `attnmux generate`, whose options are in groups."""

from __future__ import annotations

from collections.abc import Mapping

import click

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Prompts": ("file", "images", "audio", "decoder_prompt", "chat"),
    "Model": ("model", "revision", "dtype", "device"),
    "Answers": ("max_new_tokens", "temperature", "top_p", "seed", "logprobs", "deterministic"),
    "Backends": (
        *("backend", "prefill_backend", "decode_backend", "mm_backend", "linear_backend"),
        *("assignments", "mla"),
    ),
    "KV cache": ("page_size", "kv_dtype", "kv_dtype_skip", "memory", "kept_states", "context"),
    "Batching": ("max_running", "prefill_tokens"),
    "Graphs": ("graph", "graph_sizes", "graph_padding", "piece_sizes", "compile"),
    "Drafts": (
        *("draft", "draft_tokens", "topk", "steps", "draft_backend", "speculative_attention_mode"),
        *("draft_always", "accept_threshold_single", "accept_threshold_acc"),
    ),
    "Sparse decoding": ("sparse", "sparse_budget"),
    "Several devices": ("tp", "dcp", "pcp", "pcp_min_tokens", "dp_attention"),
    "Checks": ("canary", "keep_failures", "keep_values"),
}
"""The names of parameters by heading. What has no group comes last."""


class GroupedCommand(click.Command):
    """A command whose help shows its options by `GROUPS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            str(parameter.name): parameter.get_help_record(ctx)
            for parameter in self.get_params(ctx)
        }
        rest = tuple(
            name for name in records if not any(name in names for names in GROUPS.values())
        )
        for heading, names in {**GROUPS, "Other options": rest}.items():
            rows = [row for name in names if (row := records.get(name)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
