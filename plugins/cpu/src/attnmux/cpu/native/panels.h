// Many queries: matrix products in registers, over a block of K and V that was copied once for all of
// them. Q is kept as panels [D][PANEL], so that no product needs a sum across lanes.
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

template <Type T> struct Panels {
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int height = step.height(item), padded = round_up(height, PANEL), strips = round_up(height, STRIP);
    const int width = step.width, out_width = step.out_width;

    void prepare() {
        s.q.assign(size_t(padded) * width, 0.0f);
        s.k.assign(size_t(PANEL_KEYS) * width, 0.0f);
        if (c.v) s.v.assign(size_t(PANEL_KEYS) * out_width, 0.0f);
        s.scores.assign(size_t(PANEL_KEYS) * padded + STRIP, 0.0f);
        s.out.assign(size_t(strips) * out_width, 0.0f);
        s.top.assign(padded, NONE), s.sum.assign(padded, 0.0f), s.decay.assign(padded, 0.0f);
        s.row.resize(2 * std::max(width, out_width) + BLOCK);
        float* arranged = s.row.data() + width + BLOCK;
        for (int r = 0; r < height; ++r) {
            step.query(item, item.head, r, s.row.data());
            arrange(T, s.row.data(), arranged, width);
            float* panel = s.q.data() + int64_t(r / PANEL) * width * PANEL + r % PANEL;
            for (int d = 0; d < width; ++d) panel[d * PANEL] = arranged[d] * step.scaling;
        }
    }
    void fill(const int32_t* slots, int num) {
        for (int j = 0; j < num; ++j) {
            widen<T>(step.key_row(slots[j], item.head), step.D, width, s.k.data() + int64_t(j) * width);
            if (c.v) widen<T>(step.value_row(slots[j], item.head), step.Dv, out_width, s.v.data() + int64_t(j) * out_width);
        }
    }
    void multiply(const Seen& seen, int at_key, int num, const int32_t* next, int num_next) {
        const int total = padded / PANEL * PANEL_KEYS;
        for (int r = 0, done = 0; r < padded; r += PANEL) {
            int low, high;
            seen.bounds(r, PANEL, at_key, num, low, high);
            for (int j = 0; j < PANEL_KEYS; j += STRIP, done += STRIP) {
                fetch_rows<T>(step, item, next, num_next * done / total, num_next * (done + STRIP) / total);
                if (j + STRIP <= low || j >= high) continue;
                if (height - r <= W) multiply_strip<1>(r, j);
                else multiply_strip<2>(r, j);
            }
        }
    }
    // The logits of HALVES * W rows and STRIP keys.
    template <int HALVES> void multiply_strip(int r, int j) {
        const float* panel = s.q.data() + int64_t(r) * width;
        vec sums[STRIP][HALVES] = {};
        product(s.k.data() + int64_t(j) * width, width, 1, panel, PANEL, width, sums);
        for (int i = 0; i < STRIP; ++i)
            for (int half = 0; half < HALVES; ++half) store(s.scores.data() + int64_t(j + i) * padded + r + half * W, sums[i][half]);
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
                product(s.scores.data() + int64_t(low) * padded + r, 1, padded, values + int64_t(low) * stride + d, stride, high - low, sums);
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
            weigh_all(step, s, seen, padded, height, key, num);
            gather(seen, key, num);
        }
        for (int r = 0; r < height; ++r) {
            const float* out = s.out.data() + int64_t(r) * out_width;
            restore(T, out, s.row.data(), out_width);
            finish(step, item, item.head, r, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};

static inline void panels(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case F32: return Panels<F32>{step, item, s}.run();
    case F16: return Panels<F16>{step, item, s}.run();
    case BF16: return Panels<BF16>{step, item, s}.run();
    case E4M3: return Panels<E4M3>{step, item, s}.run();
    case E5M2: return Panels<E5M2>{step, item, s}.run();
    }
}
