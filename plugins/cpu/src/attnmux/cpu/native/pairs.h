// Many queries, as products of pairs of bfloat16 (AVX-512-BF16) that are added in float32.
//
// Q is packed as pairs of values, 16 rows beside each other. Rows of K and V are read where they lie:
// words of K are broadcast, and V is paired key by key in registers. Up to 32 rows at a time meet
// a block of keys, so that their logits and weights stay in the first cache.
#pragma once

#include "columns.h"

#if defined(__AVX512BF16__) && LANES == 16

constexpr int PAIR_KEYS = 128;   // of a block
constexpr int AT_ONCE = 2 * W;   // rows
constexpr int SUMMED = 8;        // keys whose logits are summed in registers

// Logits of 32 rows and SUMMED keys. BOTH: of the W rows of q and those of `below`; else of q's
// alone, by even and odd pairs of values, so that as many sums do not wait for each other.
template <bool BOTH>
static inline void pair_logits(const int32_t* const* keys, const int32_t* q, const int32_t* below, int num, float scaling, float* logits) {
    constexpr int STEP = BOTH ? 1 : 2;
    const int32_t* k[SUMMED];
    for (int i = 0; i < SUMMED; ++i) k[i] = keys[i];
    vec sums[SUMMED][2];
#pragma GCC unroll 8
    for (int i = 0; i < SUMMED; ++i) sums[i][0] = sums[i][1] = vec{};
    for (int at = 0; at < num; at += STEP) {
        const ivec one = load_ints(q + at * W), other = load_ints(BOTH ? below + at * W : q + (at + 1) * W);
#pragma GCC unroll 8
        for (int i = 0; i < SUMMED; ++i) {
            sums[i][0] = add_pairs(sums[i][0], k[i][at] - ivec{}, one);
            sums[i][1] = add_pairs(sums[i][1], k[i][at + STEP - 1] - ivec{}, other);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < SUMMED; ++i) {
        store(logits + i * AT_ONCE, (BOTH ? sums[i][0] : sums[i][0] + sums[i][1]) * scaling);
        if (BOTH) store(logits + i * AT_ONCE + W, sums[i][1] * scaling);
    }
}

// out[row][.] = out * decay[row] + weights . V for W rows and W columns: those of `first_pairs` or
// of `last_pairs` of the 32 from `values` on.
template <bool LAST>
static inline void pair_mix(const char* const* values, int64_t at, const int32_t* weights, int num, const float* decay, float* out) {
    vec sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) sums[i] = load(out + i * W) * decay[i];
    for (int j = 0; j < num; ++j) {
        const ivec one = load_ints(values[2 * j] + at), other = load_ints(values[2 * j + 1] + at);
        const ivec paired = LAST ? last_pairs(one, other) : first_pairs(one, other);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) sums[i] = add_pairs(sums[i], weights[j * AT_ONCE + i] - ivec{}, paired);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(out + i * W, sums[i]);
}

template <Type T> struct Pairs {
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int height = step.height(item), padded = round_up(height, W);
    const int width = step.width, out_width = step.out_width;
    const int32_t* keys[PAIR_KEYS + SUMMED];
    const char* values[PAIR_KEYS + 2];

    void prepare() {
        pack_queries(step, item, width, s);
        s.scores.resize(size_t(PAIR_KEYS + SUMMED) * AT_ONCE);
        s.pairs.resize(size_t(PAIR_KEYS / 2) * AT_ONCE);
        s.out.assign(size_t(padded) * out_width, 0.0f);
        s.top.assign(padded, NONE), s.sum.assign(padded, 0.0f), s.decay.resize(padded);
        s.row.resize(out_width);
    }
    // A row in bfloat16 with zeros up to a multiple of 32 values: itself, or a copy.
    const char* row(const char* from, int n, int to, char* copy) const {
        if (T == BF16 && n == to) return from;
        copy_row<T>(from, n, to, copy);
        return copy;
    }
    void find(const int32_t* slots, int num) {
        const int64_t k_row = int64_t(width) * 2, v_row = int64_t(out_width) * 2;
        s.narrow_k.resize(size_t(PAIR_KEYS) * k_row);
        if (c.v) s.narrow_v.resize(size_t(PAIR_KEYS) * v_row);
        for (int j = 0; j < num; ++j) {
            const char* key = row(step.key_row(slots[j], item.head), step.D, width, s.narrow_k.data() + j * k_row);
            keys[j] = reinterpret_cast<const int32_t*>(key);
            values[j] = c.v ? row(step.value_row(slots[j], item.head), step.Dv, out_width, s.narrow_v.data() + j * v_row) : key;
        }
        std::fill(keys + num, keys + num + SUMMED, keys[num - 1]);
        values[num] = values[num - 1];
    }
    void multiply(int r, int low, int high) {
        const int32_t *q = reinterpret_cast<const int32_t*>(s.narrow_q.data()) + int64_t(r) * width / 2, *below = q + W * width / 2;
        for (int j = low / SUMMED * SUMMED; j < high; j += SUMMED) {
            float* logits = s.scores.data() + j * AT_ONCE;
            if (r + W < padded) pair_logits<true>(keys + j, q, below, width / 2, step.scaling, logits);
            else pair_logits<false>(keys + j, q, nullptr, width / 2, step.scaling, logits);
        }
    }
    void gather(int r, int low, int high) {
        const int num = (high + 1) / 2 - low / 2;
        const int32_t* weights = s.pairs.data() + low / 2 * AT_ONCE + r % AT_ONCE;
        float* out = s.out.data() + int64_t(r) * out_width;
        for (int d = 0; d < out_width; d += BLOCK) {
            pair_mix<false>(values + low / 2 * 2, 2 * d, weights, num, &s.decay[r], out + d * W);
            pair_mix<true>(values + low / 2 * 2, 2 * d, weights, num, &s.decay[r], out + (d + W) * W);
        }
    }
    void run() {
        prepare();
        const Seen seen(step, item, s, padded);
        const int32_t* slots = step.slots(item);
        for (int key = item.key; key < item.key_end; key += PAIR_KEYS) {
            const int num = std::min(PAIR_KEYS, item.key_end - key), left = std::min(PAIR_KEYS, item.key_end - key - num);
            find(slots + key, num);
            for (int r = 0; r < padded; r += AT_ONCE) {
                const int end = std::min(padded, r + AT_ONCE);
                fetch_rows<T>(step, item, slots + key + num, left * r / padded, left * end / padded);
                int low, high;
                seen.bounds(r, end - r, key, num, low, high);
                if (low >= high) continue;
                low &= ~1;
                multiply(r, low, high);
                for (int at = r; at < end; at += W) {
                    weigh<true>(s, seen, c.cap, s.scores.data() + at - r, AT_ONCE, at, key, low, high, s.pairs.data() + at - r);
                    gather(at, low, high);
                }
            }
        }
        for (int r = 0; r < height; ++r) {
            const float* out = s.out.data() + int64_t(r / W * W) * out_width + r % W * W;
            for (int d = 0; d < out_width; d += BLOCK) restore_pairs(out + d * W, out + (d + W) * W, s.row.data() + d);
            finish(step, item, item.head, r, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};

static inline void pairs(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case E4M3: return Pairs<E4M3>{step, item, s}.run();
    case E5M2: return Pairs<E5M2>{step, item, s}.run();
    default: return Pairs<BF16>{step, item, s}.run();
    }
}
#else
static inline void pairs(Step&, const Item&, Scratch&) {}
#endif
