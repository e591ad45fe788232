// How the work of a step is cut, so that every thread has some.
//
// With `split` the cuts of keys and the kernel of a row follow its own request alone: neither the
// rest of the batch nor the number of threads changes a bit of its result.
#pragma once

#include "step.h"

// A block of queries and the keys that some of them see.
struct Block {
    Kernel kernel;
    int32_t request, begin, end;
    int64_t low, high;
};

static inline Block block_of(const Call& c, Kernel kernel, int request, int begin, int end) {
    int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
    for (int t = c.qo_indptr[request] + begin; t < c.qo_indptr[request] + end; ++t) {
        low = std::min(low, c.first[t]);
        high = std::max(high, c.end[t]);
    }
    low = std::max<int64_t>(low, 0);
    return {kernel, request, begin, end, low, std::max(low, high)};
}

static inline std::vector<Block> blocks_of(const Step& step) {
    const Call& c = step.call;
    std::vector<Block> blocks;
    for (int b = 0; b < c.num_requests; ++b) {
        const int num = c.qo_indptr[b + 1] - c.qo_indptr[b];
        Kernel kernel = num * step.group < LEAST_TILE_ROWS ? step.fewest : step.few;
        int tokens = num;
        if (num * int64_t(step.group) >= FEW) {
            kernel = step.many;
            tokens = std::max(1, step.many_rows / step.group);
        }
        for (int begin = 0; begin < num; begin += tokens)
            blocks.push_back(block_of(c, kernel, b, begin, std::min(begin + tokens, num)));
    }
    return blocks;
}

static inline int64_t rows_by_keys(const Step& step, const Block& block) {
    return (block.high - block.low) * (block.end - block.begin) * step.group * step.call.num_kv_heads;
}

static inline void cut(Step& step) {
    const Call& c = step.call;
    const std::vector<Block> blocks = blocks_of(step);
    int64_t work = 0;
    for (const Block& block : blocks) work += rows_by_keys(step, block);
    // Several shares for each of several threads, where they are long: then the last to end is no long wait.
    const int64_t share = work / (c.num_threads > 1 ? 4 * int64_t(c.num_threads) : 1) + 1;
    int64_t rows = 0;
    for (const Block& block : blocks) {
        const int height = (block.end - block.begin) * step.group;
        // The heads of an item of few queries share the pages of their keys, so its keys are cut first
        int heads = block.kernel == step.many ? 1 : c.num_kv_heads;
        int64_t split = c.split;
        if (!split) {
            split = share / (int64_t(height) * heads) + 1;
            split = std::max<int64_t>((split + CUT - 1) / CUT * CUT, 2 * CUT);
        }
        const int64_t from = block.low / split, to = std::max(from + 1, (block.high + split - 1) / split);
        const int parts = int(to - from);
        const int64_t fitting = std::max<int64_t>(c.num_threads / (parts * int64_t(blocks.size())), 1);
        heads = std::max<int>(1, heads / fitting);
        for (int head = 0; head < c.num_kv_heads; head += heads) {
            const int head_end = std::min(head + heads, c.num_kv_heads);
            const int64_t stride = int64_t(head_end - head) * height;
            if (parts > 1)
                for (int h = head; h < head_end; ++h)
                    step.splits.push_back({block.request, block.begin, block.end, h, rows + (h - head) * height, stride, parts});
            for (int64_t part = from; part < to; ++part) {
                const int64_t key = std::max(block.low, part * split), stop = std::min(block.high, (part + 1) * split);
                step.items.push_back({block.kernel, block.request, block.begin, block.end, head, head_end, int32_t(key), int32_t(std::max(key, stop)), parts > 1 ? rows : -1});
                if (parts > 1) rows += stride;
            }
        }
    }
    // Long items first, so that no thread begins one when the others are done
    std::stable_sort(step.items.begin(), step.items.end(), [](const Item& one, const Item& other) {
        return int64_t(one.key_end - one.key) * (one.end - one.begin) > int64_t(other.key_end - other.key) * (other.end - other.begin);
    });
    step.partials.reset(new float[size_t(rows) * (step.Dv + 2)]);
}
