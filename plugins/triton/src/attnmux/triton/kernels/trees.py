"""Builds draft trees and samples them.

A program holds all nodes of a tree, NODES padded to BLOCK_D. Links between them are compared in
tiles of BLOCK_D x BLOCK_D. Ids and indices are int64 in memory, int32 in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def best_candidates(
    scores, num_candidates, BLOCK_D: tl.constexpr, NODES: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """[BLOCK_D] int32: the candidates of nodes 1 to NODES - 1, in their order; 0 elsewhere.

    A candidate's rank is the number of those before it by score, or by place if scores are
    alike: counting needs no sorted copy in memory.
    """
    node = tl.arange(0, BLOCK_D)
    found = tl.zeros((BLOCK_D,), tl.int32)
    num_found = 0
    for first in range(0, num_candidates, BLOCK_N):
        one = first + tl.arange(0, BLOCK_N)
        is_one = one < num_candidates
        score = tl.load(scores + one, mask=is_one, other=float("-inf"))
        rank = tl.zeros((BLOCK_N,), tl.int32)
        for start in range(0, num_candidates, BLOCK_N):
            other = start + tl.arange(0, BLOCK_N)
            is_other = other < num_candidates
            rival = tl.load(scores + other, mask=is_other, other=float("-inf"))
            alike = (rival[None, :] == score[:, None]) & (other[None, :] < one[:, None])
            before = (rival[None, :] > score[:, None]) | alike
            rank += tl.sum((before & is_other[None, :]).to(tl.int32), 1)
        chosen = (is_one & (rank < NODES - 1)).to(tl.int32)
        place = num_found + tl.cumsum(chosen, 0)
        is_here = (place[None, :] == node[:, None]) & (chosen[None, :] > 0)
        found += tl.sum(tl.where(is_here, one[None, :], 0), 1)
        num_found += tl.sum(chosen, 0)
    return found


@triton.jit(
    do_not_specialize=["batch_size", "num_candidates"],
    do_not_specialize_on_alignment=["roots", "scores", "tokens", "parents"],
)
def build_trees(
    roots, scores, tokens, parents, links, visible, batch_size, num_candidates,
    NODES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """roots [B]; scores [B, n] float32; tokens, parents [B, n]; links [3, B, NODES]: tokens,
    parents and depths; visible [B, NODES, NODES] uint8.

    Grid: B requests.
    """
    request = tl.program_id(0)
    node = tl.arange(0, BLOCK_D)
    is_draft = (node > 0) & (node < NODES)
    first = request.to(tl.int64) * num_candidates
    chosen = best_candidates(scores + first, num_candidates, BLOCK_D, NODES, BLOCK_N)
    above = tl.load(parents + first + chosen, mask=is_draft, other=-1).to(tl.int32)
    before = (chosen[None, :] <= above[:, None]) & is_draft[None, :]
    parent = tl.where(is_draft, tl.sum(before.to(tl.int32), 1), -1)
    seen = node[:, None] == node[None, :]
    depth = tl.zeros((BLOCK_D,), tl.int32)
    at = parent
    while tl.max(at, 0) >= 0:
        is_at = at[:, None] == node[None, :]
        seen = seen | is_at
        depth += (at >= 0).to(tl.int32)
        at = tl.sum(tl.where(is_at, parent[None, :] + 1, 0), 1) - 1
    token = tl.load(tokens + first + chosen, mask=is_draft, other=0)
    token = tl.where(node == 0, tl.load(roots + request), token)
    line = request.to(tl.int64) * NODES + node
    stride = batch_size.to(tl.int64) * NODES
    is_node = node < NODES
    tl.store(links + line, token, mask=is_node)
    tl.store(links + stride + line, parent.to(tl.int64), mask=is_node)
    tl.store(links + 2 * stride + line, depth.to(tl.int64), mask=is_node)
    place = line[:, None] * NODES + node[None, :]
    tl.store(visible + place, seen.to(tl.uint8), mask=is_node[:, None] & is_node[None, :])


@triton.jit
def parents_of(
    visible, request, num_nodes, IS_CHAIN: tl.constexpr, NODES: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """[BLOCK_D] int32: each node's parent, the last of its ancestors; -1 for the root and padding.

    visible [B, NODES, NODES] uint8; None for chains; num_nodes of them are no padding.
    """
    node = tl.arange(0, BLOCK_D)
    if IS_CHAIN:
        return tl.where(node < num_nodes, node - 1, -1)
    else:
        place = (request.to(tl.int64) * NODES + node[:, None]) * NODES + node[None, :]
        is_pair = (node[:, None] < NODES) & (node[None, :] < node[:, None])
        sees = tl.load(visible + place, mask=is_pair, other=0)
        return tl.max(tl.where(sees > 0, node[None, :], -1), 1)


@triton.jit
def write_path(
    path, predict, count, accepted, request, NODES: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """accepted [B, 2 * NODES + 1]: nodes, tokens and count of a path."""
    node = tl.arange(0, BLOCK_D)
    line = accepted + request.to(tl.int64) * (2 * NODES + 1)
    tl.store(line + node, path.to(tl.int64), mask=node < NODES)
    tl.store(line + NODES + node, predict, mask=node < NODES)
    tl.store(line + 2 * NODES, count.to(tl.int64))


@triton.jit
def left_over(line, column, rejected, token, vocabulary, BLOCK: tl.constexpr):
    """[BLOCK] float32: the probabilities at columns, 0 for tokens of rejected nodes [BLOCK_D]."""
    weight = tl.load(line + column, mask=column < vocabulary, other=0.0)
    end = tl.max(column, 0) + 1
    hidden = tl.min(tl.where(rejected & (token >= end - BLOCK), token, end), 0)
    # One after another: a tile of nodes and columns would not fit
    while hidden < end:
        weight = tl.where(column == hidden, 0.0, weight)
        hidden = tl.min(tl.where(rejected & (token > hidden), token, end), 0)
    return weight


@triton.jit
def drawn_token(
    line, rejected, token, coin, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """int32: the token that coin [0, 1) float64 draws from the rest; -1 if nothing is left or
    values are no numbers."""
    whole = coin * 0.0
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        weight = left_over(line, column, rejected, token, vocabulary, BLOCK)
        whole += tl.sum(weight, 0).to(tl.float64)
    wanted = coin * whole
    before = coin * 0.0
    found = tl.full((), -1, tl.int32)
    last = tl.full((), -1, tl.int32)
    first = tl.full((), 0, tl.int32)
    while (first < vocabulary) & (found < 0):
        column = first + tl.arange(0, BLOCK)
        weight = left_over(line, column, rejected, token, vocabulary, BLOCK)
        sums = before + tl.cumsum(weight, 0).to(tl.float64)
        above = (sums > wanted) & (weight > 0)
        here = tl.min(tl.where(above, column, vocabulary), 0)
        found = tl.where(here < vocabulary, here, -1)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, column, -1), 0))
        before += tl.sum(weight, 0).to(tl.float64)
        first += BLOCK
    found = tl.where(found < 0, last, found)
    return tl.where(whole > 0, found, -1)


@triton.jit(
    do_not_specialize=["num_nodes", "vocabulary"],
    do_not_specialize_on_alignment=["tokens", "visible", "probs", "coins"],
)
def sample_trees(
    tokens, visible, probs, coins, accepted, single, acc, num_nodes, vocabulary,
    NODES: tl.constexpr, IS_CHAIN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens [B, NODES]; probs [B, NODES, vocabulary] float32; coins [B, NODES] float64; visible
    as in `parents_of`; accepted as in `write_path`; single, acc: the thresholds.

    Grid: B requests.
    """
    request = tl.program_id(0)
    node = tl.arange(0, BLOCK_D)
    is_node = node < NODES
    parent = parents_of(visible, request, num_nodes, IS_CHAIN, NODES, BLOCK_D)
    line = request.to(tl.int64) * NODES + node
    token = tl.load(tokens + line, mask=is_node, other=-1)
    coin = tl.load(coins + line, mask=is_node, other=0.0)
    twins = (parent[:, None] == parent[None, :]) & (token[:, None] == token[None, :])
    twins = twins & (node[None, :] < node[:, None]) & is_node[None, :]
    counts = is_node & (token >= 0) & (token < vocabulary)
    counts = counts & (tl.sum(twins.to(tl.int32), 1) == 0)
    path = tl.where(node == 0, 0, -1)
    predict = tl.full((BLOCK_D,), -1, tl.int64)
    number = tl.sum(tl.where(node == 0, coin, 0.0), 0)
    low = number * 0.0
    at = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    child = tl.full((), 0, tl.int32)
    while child < BLOCK_D:
        follows = counts & (parent == at)
        row = probs + (request.to(tl.int64) * NODES + at) * vocabulary
        chance = tl.load(row + token, mask=follows, other=0.0).to(tl.float64)
        reached = tl.cumsum(chance, 0) / acc
        accepts = follows & ((reached > number) | (chance >= single))
        child = tl.min(tl.where(accepts, node, BLOCK_D), 0)
        low = tl.max(reached, 0)
        if child < BLOCK_D:
            at = child
            predict = tl.where(node == count, tl.sum(tl.where(node == child, token, 0), 0), predict)
            count += 1
            number = tl.sum(tl.where(node == child, coin, 0.0), 0)
            path = tl.where(node == count, child, path)
    row = probs + (request.to(tl.int64) * NODES + at) * vocabulary
    rest = (number - low) / (1.0 - low)
    rest = tl.minimum(tl.maximum(rest, 0.0), 1.0)
    drawn = drawn_token(row, is_node & (parent == at), token, rest, vocabulary, BLOCK)
    predict = tl.where(node == count, drawn.to(tl.int64), predict)
    write_path(path, predict, count, accepted, request, NODES, BLOCK_D)
