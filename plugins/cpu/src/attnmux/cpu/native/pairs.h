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
constexpr int PAIRS_AHEAD = 16;  // keys between the one that is read where it lies and the one that is fetched
constexpr int SUMMED = 8;        // keys whose logits are summed in registers

// Logits of SUMMED keys and 32 rows. BOTH: the W rows of q and those of `below`; else q's alone, by
// even and odd pairs of values, so that as many sums do not wait for each other. Fetches rows of type
// T from `next` and `more`, which may be null.
template <Type T, bool BOTH>
static inline void pair_logits(const int32_t* const* keys, const int32_t* q, const int32_t* below, int num, float scaling, float* logits, const char* const* next, const char* const* more) {
    constexpr int STEP = BOTH ? 1 : 2;
    const int32_t* k[SUMMED];
    for (int i = 0; i < SUMMED; ++i) k[i] = keys[i];
    vec sums[SUMMED][2];
#pragma GCC unroll 8
    for (int i = 0; i < SUMMED; ++i) sums[i][0] = sums[i][1] = vec{};
    for (int line = 0; line < num; line += W) {
        if (next)
            for (int i = 0; i < SUMMED; ++i) {
                prefetch(next[i] + 2 * size_of(T) * line);
                if (more) prefetch(more[i] + 2 * size_of(T) * line);
            }
#pragma GCC unroll 16
        for (int at = line; at < line + W; at += STEP) {
            const ivec one = load_ints(q + at * W), other = load_ints(BOTH ? below + at * W : q + (at + 1) * W);
#pragma GCC unroll 8
            for (int i = 0; i < SUMMED; ++i) {
                sums[i][0] = add_pairs(sums[i][0], k[i][at] - ivec{}, one);
                sums[i][1] = add_pairs(sums[i][1], k[i][at + STEP - 1] - ivec{}, other);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < SUMMED; ++i) {
        store(logits + i * AT_ONCE, (BOTH ? sums[i][0] : sums[i][0] + sums[i][1]) * scaling);
        if (BOTH) store(logits + i * AT_ONCE + W, sums[i][1] * scaling);
    }
}

// out[row][.] = out * decay[row] + weights . V for W rows and W columns. paired(j): the columns of
// keys 2 j and 2 j + 1.
template <typename F>
static inline void pair_mix(F paired, const int32_t* weights, int num, const float* decay, float* out) {
    vec sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) sums[i] = load(out + i * W) * decay[i];
    for (int j = 0; j < num; ++j) {
        const ivec v = paired(j);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) sums[i] = add_pairs(sums[i], weights[j * AT_ONCE + i] - ivec{}, v);
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
    const char *next_keys[PAIR_KEYS + SUMMED], *next_values[PAIR_KEYS + SUMMED];

    void prepare() {
        pack_queries(step, item, width, s);
        s.narrow_k.resize(size_t(PAIR_KEYS) * width * 2), s.narrow_v.resize(size_t(PAIR_KEYS) * out_width * 2);
        s.scores.resize(size_t(PAIR_KEYS + SUMMED) * AT_ONCE);
        s.pairs.resize(size_t(PAIR_KEYS / 2) * AT_ONCE);
        s.out.assign(size_t(padded) * out_width, 0.0f);
        s.top.assign(padded, NONE), s.sum.assign(padded, 0.0f), s.decay.resize(padded);
        s.row.resize(out_width);
    }
    // A row in bfloat16 with zeros up to a multiple of 32 values: itself, or a copy.
    const char* row(const char* from, int n, int to, int j, Aligned<char>& copies) const {
        if (T == BF16 && n == to) return from;
        char* copy = copies.data() + int64_t(j) * to * 2;
        copy_row<T>(from, n, to, copy);
        return copy;
    }
    // The rows of a block's keys, and those to fetch meanwhile.
    void find(const int32_t* slots, int num, int left) {
        for (int j = 0; j < num; ++j) {
            const char *key = step.key_row(slots[j], item.head), *value = step.value_row(slots[j], item.head);
            key = row(key, step.D, width, j, s.narrow_k);
            keys[j] = reinterpret_cast<const int32_t*>(key);
            values[j] = c.v ? row(value, step.Dv, out_width, j, s.narrow_v) : key;
        }
        std::fill(keys + num, keys + num + SUMMED, keys[num - 1]);
        values[num] = values[num - 1];
        const int ahead = keys[0] == reinterpret_cast<const int32_t*>(s.narrow_k.data()) ? PAIR_KEYS : PAIRS_AHEAD;
        for (int j = 0; j < PAIR_KEYS + SUMMED; ++j) {
            const int32_t slot = slots[std::min(j + ahead, left - 1)];
            next_keys[j] = step.key_row(slot, item.head), next_values[j] = step.value_row(slot, item.head);
        }
    }
    void multiply(int r, int low, int high, bool is_first) {
        const int32_t *q = reinterpret_cast<const int32_t*>(s.narrow_q.data()) + int64_t(r) * width / 2, *below = q + W * width / 2;
        for (int j = low / SUMMED * SUMMED; j < high; j += SUMMED) {
            float* logits = s.scores.data() + j * AT_ONCE;
            const char* const* next = is_first ? next_keys + j : nullptr;
            const char* const* more = is_first && c.v ? next_values + j : nullptr;
            if (r + W < padded) pair_logits<T, true>(keys + j, q, below, width / 2, step.scaling, logits, next, more);
            else pair_logits<T, false>(keys + j, q, nullptr, width / 2, step.scaling, logits, next, more);
        }
    }
    void gather(int r, int low, int high) {
        const int num = (high + 1) / 2 - low / 2;
        const int32_t* weights = s.pairs.data() + low / 2 * AT_ONCE + r % AT_ONCE;
        float* out = s.out.data() + int64_t(r) * out_width;
        for (int d = 0; d < out_width; d += BLOCK) {
            const char* const* v = values + low / 2 * 2;
            const auto two = [&](auto pair, int j) { return pair(load_ints(v[2 * j] + 2 * d), load_ints(v[2 * j + 1] + 2 * d)); };
            pair_mix([&](int j) { return two(first_pairs, j); }, weights, num, &s.decay[r], out + d * W);
            pair_mix([&](int j) { return two(last_pairs, j); }, weights, num, &s.decay[r], out + (d + W) * W);
        }
    }
    void run() {
        prepare();
        const Seen seen(step, item, s, padded);
        const int32_t* slots = step.slots(item);
        for (int key = item.key; key < item.key_end; key += PAIR_KEYS) {
            const int num = std::min(PAIR_KEYS, item.key_end - key);
            find(slots + key, num, item.key_end - key);
            for (int r = 0; r < padded; r += AT_ONCE) {
                const int end = std::min(padded, r + AT_ONCE);
                int low, high;
                seen.bounds(r, end - r, key, num, low, high);
                if (low >= high) continue;
                low &= ~1;
                multiply(r, low, high, r == 0);
                for (int at = r; at < end; at += W) {
                    weigh<true>(s, seen, c.cap, s.scores.data() + at - r, AT_ONCE, at, key, low, high, s.pairs.data() + at - r);
                    gather(at, low, high);
                }
            }
        }
        for (int r = 0; r < height; ++r) {
            const float* out = s.out.data() + int64_t(r / W * W) * out_width + r % W * W;
            for (int d = 0; d < out_width; d += BLOCK) restore_pairs(load(out + d * W), load(out + (d + W) * W), s.row.data() + d);
            if (item.partial < 0 && r + SUMMED < height) step.fetch_result(item, item.head, r + SUMMED);
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
