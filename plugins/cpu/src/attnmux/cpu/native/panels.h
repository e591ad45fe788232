// Many queries: matrix products in registers, over a block of K and V that was copied once for all of
// them. Q is kept as panels [D][PANEL], so that no product needs a sum across lanes.
//
// Products are of float32, or with AVX-512-BF16 of pairs of bfloat16: panels are [D / 2][PANEL]
// pairs, the weights are rounded to bfloat16, and V is in pairs of keys.
#pragma once

#include "columns.h"

constexpr int PANEL = 2 * W;                        // rows
constexpr int PANEL_KEYS = W == 16 ? 64 : 48;       // of a block, a multiple of STRIP
constexpr int STRIP = W == 16 ? 8 : 6;              // rows of a product whose sums fit into registers

// sums[i] += one[i * stride + n * step] * other[n][0..HALVES * W)
template <int HALVES>
static inline void product(const float* one, int64_t stride, int64_t step, const float* other, int64_t other_stride, int n, vec (&sums)[STRIP][HALVES]) {
    for (int at = 0; at < n; ++at) {
        vec parts[HALVES];
        for (int half = 0; half < HALVES; ++half) parts[half] = load(other + at * other_stride + half * W);
        for (int i = 0; i < STRIP; ++i) {
            const vec factor = all(one[i * stride + at * step]);
            for (int half = 0; half < HALVES; ++half) sums[i][half] += factor * parts[half];
        }
    }
}

// The same for pairs of bfloat16.
template <int HALVES>
static inline void product(const int32_t* one, int64_t stride, int64_t step, const int32_t* other, int64_t other_stride, int n, vec (&sums)[STRIP][HALVES]) {
    for (int at = 0; at < n; ++at) {
        ivec parts[HALVES];
        for (int half = 0; half < HALVES; ++half) parts[half] = load_ints(other + at * other_stride + half * W);
        for (int i = 0; i < STRIP; ++i) {
            const ivec factor = one[i * stride + at * step] - ivec{};
            for (int half = 0; half < HALVES; ++half) sums[i][half] = add_pairs(sums[i][half], factor, parts[half]);
        }
    }
}

template <Type T, bool PAIRS> struct Panels {
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int height = step.height(item), padded = round_up(height, PANEL), strips = round_up(height, STRIP);
    const int width = step.width, out_width = step.out_width;
    const int64_t k_row = int64_t(width) * (PAIRS ? 2 : 4);

    void prepare() {
        s.q.assign(size_t(padded) * width / (PAIRS ? 2 : 1), 0.0f);
        if (PAIRS) {
            s.narrow_k.assign(size_t(PANEL_KEYS) * k_row, 0);
            s.narrow_v.assign(size_t(PANEL_KEYS + 2) * out_width * 2, 0);
            s.pairs.assign(size_t(PANEL_KEYS / 2) * padded + STRIP, 0);
        } else {
            s.k.assign(size_t(PANEL_KEYS) * width, 0.0f);
            if (c.v) s.v.assign(size_t(PANEL_KEYS) * out_width, 0.0f);
        }
        s.scores.assign(size_t(PANEL_KEYS) * padded + STRIP, 0.0f);
        s.out.assign(size_t(strips) * out_width, 0.0f);
        s.top.assign(padded, NONE), s.sum.assign(padded, 0.0f), s.decay.assign(padded, 0.0f);
        s.row.resize(2 * std::max(width, out_width) + BLOCK);
        float* arranged = s.row.data() + width + BLOCK;
        for (int r = 0; r < height; ++r) {
            step.query(item, item.head, r, s.row.data());
            if (PAIRS) {
                narrow(s.row.data(), arranged, BF16, width);
                float* pairs = s.q.data() + int64_t(r / PANEL) * width / 2 * PANEL + r % PANEL;
                for (int i = 0; i < width / 2; ++i) std::memcpy(pairs + i * PANEL, arranged + i, 4);
                continue;
            }
            arrange(T, s.row.data(), arranged, width);
            float* panel = s.q.data() + int64_t(r / PANEL) * width * PANEL + r % PANEL;
            for (int d = 0; d < width; ++d) panel[d * PANEL] = arranged[d] * step.scaling;
        }
    }
    // K in bfloat16, and V in pairs of keys; behind an odd number of keys lies one of zeros.
    void fill_pairs(const int32_t* slots, int num) {
        char *keys = s.narrow_k.data(), *packed = s.narrow_v.data(), *pair = packed + int64_t(PANEL_KEYS) * out_width * 2;
        const int64_t v_row = int64_t(out_width) * 2;
        for (int j = 0; j < num; ++j) copy_row<T>(step.key_row(slots[j], item.head), step.D, width, keys + j * k_row);
        if (num % 2) std::memset(keys + num * k_row, 0, size_t(k_row));
        for (int j = 0; j < num; j += 2) {
            const char *one = keys + j * k_row, *other = one + k_row;
            if (c.v) {
                for (int i = 0; i < 2; ++i) {
                    if (j + i < num) copy_row<T>(step.value_row(slots[j + i], item.head), step.Dv, out_width, pair + i * v_row);
                    else std::memset(pair + i * v_row, 0, size_t(v_row));
                }
                one = pair, other = pair + v_row;
            }
            int32_t* to = reinterpret_cast<int32_t*>(packed + j * v_row);
            for (int d = 0; d < out_width; d += BLOCK) {
                const ivec a = load_ints(one + 2 * d), b = load_ints(other + 2 * d);
                *reinterpret_cast<loose_ints*>(to + d) = first_pairs(a, b);
                *reinterpret_cast<loose_ints*>(to + d + W) = last_pairs(a, b);
            }
        }
    }
    void fill(const int32_t* slots, int num) {
        if (PAIRS) return fill_pairs(slots, num);
        for (int j = 0; j < num; ++j) {
            widen<T>(step.key_row(slots[j], item.head), step.D, width, s.k.data() + int64_t(j) * width);
            if (c.v) widen<T>(step.value_row(slots[j], item.head), step.Dv, out_width, s.v.data() + int64_t(j) * out_width);
        }
    }
    // Fetches rows of the next block. A CPU drops what it cannot fetch at once, so a few at a time.
    void fetch(const int32_t* slots, int from, int to) const {
        for (int j = from; j < to; ++j) {
            const char *key = step.key_row(slots[j], item.head), *value = step.value_row(slots[j], item.head);
            for (int at = 0; at < step.D * size_of(T); at += 64) prefetch(key + at);
            if (c.v) for (int at = 0; at < step.Dv * size_of(T); at += 64) prefetch(value + at);
        }
    }
    void multiply(const Seen& seen, int at_key, int num, const int32_t* next, int num_next) {
        const int total = padded / PANEL * PANEL_KEYS;
        for (int r = 0, done = 0; r < padded; r += PANEL) {
            int low, high;
            seen.bounds(r, PANEL, at_key, num, low, high);
            for (int j = 0; j < PANEL_KEYS; j += STRIP, done += STRIP) {
                fetch(next, num_next * done / total, num_next * (done + STRIP) / total);
                if (j + STRIP <= low || j >= high) continue;
                if (height - r <= W) multiply_strip<1>(r, j);
                else multiply_strip<2>(r, j);
            }
        }
    }
    // The logits of HALVES * W rows and STRIP keys.
    template <int HALVES> void multiply_strip(int r, int j) {
        const float* panel = s.q.data() + int64_t(r) * width / (PAIRS ? 2 : 1);
        vec sums[STRIP][HALVES] = {};
        if (PAIRS) product(reinterpret_cast<const int32_t*>(s.narrow_k.data() + j * k_row), width / 2, 1, reinterpret_cast<const int32_t*>(panel), PANEL, width / 2, sums);
        else product(s.k.data() + int64_t(j) * width, width, 1, panel, PANEL, width, sums);
        for (int i = 0; i < STRIP; ++i)
            for (int half = 0; half < HALVES; ++half) store(s.scores.data() + int64_t(j + i) * padded + r + half * W, sums[i][half]);
    }
    void weigh(const Seen& seen, int key, int num) {
        if (PAIRS) scale_scores(s, step.scaling, num * padded);
        weigh_columns(s, seen, c.cap, padded, height, out_width, key, num);
        if (PAIRS) pair_weights(s, padded, num);
    }
    void gather(const Seen& seen, int key, int num) {
        const float* values = c.v ? s.v.data() : s.k.data();
        const int stride = c.v ? out_width : width;
        for (int r = 0; r < strips; r += STRIP) {
            int low, high;
            seen.bounds(r, std::min(STRIP, padded - r), key, num, low, high);
            for (int d = 0; d < out_width; d += BLOCK) {
                vec sums[STRIP][2];
                float* out = s.out.data() + int64_t(r) * out_width + d;
                for (int i = 0; i < STRIP; ++i)
                    for (int half = 0; half < 2; ++half) sums[i][half] = load(out + i * out_width + half * W);
                if (PAIRS) product(s.pairs.data() + int64_t(low / 2) * padded + r, 1, padded, reinterpret_cast<const int32_t*>(s.narrow_v.data()) + int64_t(low / 2) * out_width + d, out_width, (high + 1) / 2 - low / 2, sums);
                else product(s.scores.data() + int64_t(low) * padded + r, 1, padded, values + int64_t(low) * stride + d, stride, high - low, sums);
                for (int i = 0; i < STRIP; ++i)
                    for (int half = 0; half < 2; ++half) store(out + i * out_width + half * W, sums[i][half]);
            }
        }
    }
    void run() {
        prepare();
        const Seen seen(step, item, s, padded);
        const int32_t* slots = step.slots(item);
        for (int key = item.key; key < item.key_end; key += PANEL_KEYS) {
            const int num = std::min(PANEL_KEYS, item.key_end - key), left = item.key_end - key - num;
            fill(slots + key, num);
            multiply(seen, key, num, slots + key + num, std::min(PANEL_KEYS, left));
            weigh(seen, key, num);
            gather(seen, key, num);
        }
        for (int r = 0; r < height; ++r) {
            const float* out = s.out.data() + int64_t(r) * out_width;
            if (PAIRS) restore_pairs(out, s.row.data(), out_width);
            else restore(T, out, s.row.data(), out_width);
            finish(step, item, item.head, r, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};

static inline void panels(Step& step, const Item& item, Scratch& s) {
    const bool pairs = HAS_PAIRS && step.q_type == BF16;
    switch (step.kv_type) {
    case F32: return Panels<F32, false>{step, item, s}.run();
    case F16: return Panels<F16, false>{step, item, s}.run();
    case BF16: return pairs ? Panels<BF16, HAS_PAIRS>{step, item, s}.run() : Panels<BF16, false>{step, item, s}.run();
    case E4M3: return pairs ? Panels<E4M3, HAS_PAIRS>{step, item, s}.run() : Panels<E4M3, false>{step, item, s}.run();
    case E5M2: return pairs ? Panels<E5M2, HAS_PAIRS>{step, item, s}.run() : Panels<E5M2, false>{step, item, s}.run();
    }
}
