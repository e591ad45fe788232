"""Dense attention in float64, slow and plain, that every backend is compared with.

It loops over requests and reads the KV pool through the request table. It shares no code with the
index builders, so that it cannot have the same errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.testing.reference.wide_rows import wide_rows

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch, KVPool, LayerSpec


def attention(
    q: torch.Tensor,
    layer: LayerSpec,
    batch: ForwardBatch,
    req_to_token: torch.Tensor,
    pool: KVPool,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    only: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer over a step whose K and V are in the pool.

    q: [T, Hq, D]; [T, Hq, 3 * D] for kind "dual_chunk"; with `q_rope` the latent part of an
    absorbed MLA query. req_to_token: the request table. k, v, k_rope: given for an extend step that
    does not save them. Then they are all keys (of all encoder tokens in cross attention), and the
    pool is not read. only: [T] bool, the tokens to compute; the results of others are as of rows of
    no request. Returns `out [T, Hq, Dv]` and `lse [T, Hq]` in float64; rows of no request
    have output 0 and LSE -inf. Raises InvalidInput for an extend step without its lengths.
    """
    if q_rope is not None:
        q = torch.cat([q, q_rope], dim=-1)
    if k is not None and k_rope is not None:
        k, v = torch.cat([k, k_rope], dim=-1), k
    num_tokens, num_heads = q.shape[:2]
    out = torch.zeros(
        (num_tokens, num_heads, layer.v_head_dim), dtype=torch.float64, device=q.device
    )
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64, device=q.device)

    custom_masks = _custom_masks(batch)
    first_row = 0
    for request in range(batch.batch_size):
        num_new, num_cached = _lengths(batch, request)
        rows = slice(first_row, first_row + num_new)
        first_row += num_new
        if k is not None and v is not None:
            num_cached = 0
            of_request = _encoder_rows(batch, request) if layer.is_cross_attention else rows
            keys, values = k[of_request], v[of_request]
        else:
            slots = _slots(layer, batch, req_to_token, request, num_cached + num_new)
            keys, values = _read_pool(layer, pool, slots)
        bias: torch.Tensor | None = None
        if layer.is_cross_attention:
            keep = torch.ones((num_new, len(keys)), dtype=torch.bool, device=q.device)
        else:
            positions, key_positions = _positions(batch, request, num_cached, num_new)
            item_starts, shared_prefix = None, 0
            if batch.multi_item is not None:
                item_starts = positions - batch.multi_item.token_pos_in_items[rows]
                shared_prefix = int(batch.multi_item.prefix_lens[request])
            mask = custom_masks[request]
            if layer.kind == "mla" and batch.topk_indices is not None:
                mask = topk_mask(batch.topk_indices[rows], len(keys))
            keep = visibility(
                positions,
                len(keys),
                key_positions=key_positions,
                causal=layer.is_causal,
                window=layer.sliding_window_size,
                chunk=layer.attention_chunk_size,
                custom_mask=mask,
                item_starts=item_starts,
                shared_prefix=shared_prefix,
            )
            picks = None if batch.topk_indices is None else batch.topk_indices[rows]
            bias = _bias(layer, positions, len(keys), picks)
            if layer.kind == "dual_chunk":
                meets = chunks_before(positions, len(keys), layer.dual_chunk_len)
                keys, values, keep = expand_dual_chunk(keys, values, keep, meets)
        wanted = torch.arange(rows.start, rows.stop, device=q.device)
        if only is not None:
            wanted, keep = wanted[only[rows]], keep[only[rows]]
            bias = bias[only[rows]] if bias is not None else None
        out[wanted], lse[wanted] = dense_attention(
            q[wanted],
            keys,
            values,
            keep,
            scaling=layer.scaling,
            logit_cap=layer.logit_cap,
            bias=bias,
            sinks=layer.sinks,
        )
    return out, lse


def visibility(
    positions: torch.Tensor,
    num_keys: int,
    *,
    key_positions: torch.Tensor | None = None,
    causal: bool = True,
    window: int = -1,
    chunk: int = 0,
    custom_mask: torch.Tensor | None = None,
    item_starts: torch.Tensor | None = None,
    shared_prefix: int = 0,
) -> torch.Tensor:
    """The keys of one sequence that each of its tokens sees: [T, num_keys] bool.

    positions: [T], places of the tokens in the sequence. key_positions: [num_keys], where they are
    not 0, 1, … as among the drafts of a tree. causal, window, chunk: as on `LayerSpec`.
    custom_mask: T * num_keys bool values that replace causality; window and chunk still apply.
    item_starts: [T], where the item of each token starts, for many items after one prefix of
    `shared_prefix` tokens.
    """
    token = positions.unsqueeze(1)
    if key_positions is None:
        key_positions = torch.arange(num_keys, device=positions.device)
    key = key_positions.unsqueeze(0)
    keep = key <= token if causal else torch.ones_like(key <= token)
    if custom_mask is not None:
        keep = custom_mask.view(len(positions), num_keys)
    if window >= 0:
        keep = keep & (key >= token - window)
    if chunk > 0:
        keep = keep & (key // chunk == token // chunk)
    if item_starts is not None:
        keep = keep & ((key < shared_prefix) | (key >= item_starts.unsqueeze(1)))
    return keep


def alibi_bias(slopes: torch.Tensor, positions: torch.Tensor, num_keys: int) -> torch.Tensor:
    """ALiBi's share of the logits of each token and key, slope * (key - token): [T, Hq, num_keys]
    float64 (arXiv:2108.12409).

    slopes: [Hq]. positions: [T], places of the tokens in the sequence.
    """
    distance = torch.arange(num_keys, device=positions.device) - positions.unsqueeze(1)
    return slopes.double().view(1, -1, 1) * distance.unsqueeze(1)


def relative_bias(
    table: torch.Tensor, positions: torch.Tensor, num_keys: int, *, causal: bool
) -> torch.Tensor:
    """The share of relative position biases in the logits of each token and key: [T, Hq, num_keys]
    float64 (T5, arXiv:1910.10683).

    table: as `LayerSpec.relative_bias`. positions: [T], places of the tokens in the sequence.
    causal: the table ends with the value of distance 0, and later keys, which no token sees, get
    that.
    """
    most = 0 if causal else table.shape[1] // 2
    first = most + 1 - table.shape[1]
    distance = torch.arange(num_keys, device=positions.device) - positions.unsqueeze(1)
    return table[:, distance.clamp(first, most) - first].transpose(0, 1).double()


def topk_mask(topk_indices: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The keys of one sequence that an indexer picked for each token: [T, num_keys] bool.

    topk_indices: [T, topk], as on `ForwardBatch`.
    """
    keep = torch.zeros((len(topk_indices), num_keys), dtype=torch.bool, device=topk_indices.device)
    token, place = (topk_indices >= 0).nonzero(as_tuple=True)
    keep[token, topk_indices[token, place].long()] = True
    return keep


def block_mask(topk_indices: torch.Tensor, size: int, num_keys: int) -> torch.Tensor:
    """The keys of one sequence in the blocks that an indexer picked: [T, Hp, num_keys] bool.

    topk_indices: [T, Hp, topk], as on `ForwardBatch`, of blocks of `size` keys.
    """
    block = torch.arange(num_keys, device=topk_indices.device) // size
    return (topk_indices.unsqueeze(-1) == block).any(dim=2)


def chunks_before(positions: torch.Tensor, num_keys: int, chunk_len: int) -> torch.Tensor:
    """The one of its three queries with which each token meets each key: [T, num_keys] int.

    0 in the token's own chunk and after it, 1 in the chunk before, 2 in all chunks before that
    (dual chunk attention, arXiv:2402.17463). positions: [T], places of the tokens in the sequence.
    """
    key = torch.arange(num_keys, device=positions.device)
    return (positions.unsqueeze(1) // chunk_len - key // chunk_len).clamp(0, 2)


def expand_dual_chunk(
    k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, meets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and visibility for which ordinary attention of [T, Hq, 3 * D] queries is dual
    chunk attention.

    Each key is repeated three times, once for each query of a head, with zeros in the other two
    thirds. A token sees the copy of the query that meets the key.
    k: [S, Hkv, D]. v: [S, Hkv, Dv]. keep: [T, S] bool. meets: [T, S], as of `chunks_before`.
    Returns [3 * S, Hkv, 3 * D], [3 * S, Hkv, Dv] and [T, 3 * S].
    """
    dim = k.shape[-1]
    pad = torch.nn.functional.pad
    keys = [pad(k, (dim * query, dim * (2 - query))) for query in range(3)]
    visible = [keep & (meets == query) for query in range(3)]
    return torch.cat(keys), v.repeat(3, 1, 1), torch.cat(visible, dim=1)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scaling: float,
    logit_cap: float = 0.0,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one request, every step written out.

    q: [T, Hq, D]. k: [S, Hkv, D]. v: [S, Hkv, Dv]. keep: [T, S] bool. bias: [T, Hq, S],
    added to the scaled and capped logits. sinks: [Hq].
    Query head h reads KV head h // (Hq / Hkv). Returns out [T, Hq, Dv] and lse [T, Hq], float64.
    """
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    grouped = q.double().reshape(len(q), *heads, q.shape[2])
    logits = torch.einsum("tkgd,skd->tkgs", grouped, k.double()).flatten(1, 2) * scaling
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~keep.unsqueeze(1), -torch.inf)

    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double())
    # exp(-inf - -inf) is NaN, but a row without keys has weights 0
    weights = torch.exp(logits - lse.unsqueeze(-1)).masked_fill(~keep.unsqueeze(1), 0)
    out = torch.einsum("tkgs,skd->tkgd", weights.reshape(len(q), *heads, len(k)), v.double())
    return out.flatten(1, 2), lse


def _bias(
    layer: LayerSpec, positions: torch.Tensor, num_keys: int, picks: torch.Tensor | None
) -> torch.Tensor | None:
    """The bias of `alibi_bias` or `relative_bias`, and -inf where the picks of an indexer of blocks
    hide a key; None for a layer without any."""
    if layer.index_block_size and picks is not None:
        seen = block_mask(picks, layer.index_block_size, num_keys)
        seen = seen.repeat_interleave(layer.tp_q_head_num // seen.shape[1], dim=1)
        return torch.where(seen, 0.0, -torch.inf).double()
    if layer.alibi_slopes is not None:
        return alibi_bias(layer.alibi_slopes, positions, num_keys)
    if layer.relative_bias is not None:
        return relative_bias(layer.relative_bias, positions, num_keys, causal=layer.is_causal)
    return None


def _lengths(batch: ForwardBatch, request: int) -> tuple[int, int]:
    """New tokens of a request and the tokens before them."""
    if batch.forward_mode.is_decode():
        return 1, int(batch.seq_lens[request]) - 1
    new, cached = batch.extend_lens()
    return int(new[request]), int(cached[request])


def _encoder_rows(batch: ForwardBatch, request: int) -> slice:
    """Rows of an encoder's k and v that belong to a request."""
    if batch.encoder_lens is None:
        raise InvalidInput("encoder_lens", got=None, expected="lengths for cross attention")
    start = int(batch.encoder_lens[:request].sum())
    return slice(start, start + int(batch.encoder_lens[request]))


def drafts_seen(batch: ForwardBatch) -> torch.Tensor | None:
    """[B, d, d] bool: the drafts that each draft of a tree sees; None for other masks."""
    spec = batch.spec_info
    if spec is None or spec.visible_bits is None:
        return None if spec is None else spec.visible
    drafts = range(spec.draft_token_num)
    bits = [(spec.visible_bits[..., draft // 8] >> draft % 8) & 1 for draft in drafts]
    return torch.stack(bits, -1).bool()


def _positions(
    batch: ForwardBatch, request: int, num_cached: int, num_new: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions of a request's new tokens, and of its keys unless they are 0, 1, …"""
    trees, device = drafts_seen(batch), batch.seq_lens.device
    if trees is None:
        return num_cached + torch.arange(num_new, device=device), None
    positions = num_cached + trees[request].sum(1) - 1
    return positions, torch.cat([torch.arange(num_cached, device=device), positions])


def _custom_masks(batch: ForwardBatch) -> list[torch.Tensor | None]:
    """The keys that each request's mask keeps, new tokens * keys values."""
    trees = drafts_seen(batch)
    if trees is not None:
        prefixes = [_lengths(batch, request)[1] for request in range(batch.batch_size)]
        return [
            torch.cat([tree.new_ones(len(tree), prefix), tree], 1)
            for tree, prefix in zip(trees, prefixes, strict=True)
        ]
    mask = None if batch.spec_info is None else batch.spec_info.custom_mask
    parts: list[torch.Tensor | None] = []
    start = 0
    for request in range(batch.batch_size):
        num_new, num_cached = _lengths(batch, request)
        end = start + num_new * (num_cached + num_new)
        parts.append(None if mask is None else mask[start:end])
        start = end
    return parts


def _slots(
    layer: LayerSpec, batch: ForwardBatch, req_to_token: torch.Tensor, request: int, num_keys: int
) -> torch.Tensor:
    """KV slots that the layer reads for a request, in sequence order."""
    row = req_to_token[int(batch.req_pool_indices[request])]
    num_encoder = 0 if batch.encoder_lens is None else int(batch.encoder_lens[request])
    if layer.is_cross_attention:
        return row[:num_encoder]
    return row[num_encoder : num_encoder + num_keys]


def _read_pool(
    layer: LayerSpec, pool: KVPool, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the slots of the request table, in float64, de-quantised."""
    slots = pool.translate(slots.long(), layer.layer_id)
    k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
    keys, values = wide_rows(pool, layer.layer_id, slots)
    return keys.double() * k_scale, values.double() * v_scale
