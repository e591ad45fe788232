// Many queries, in float32: matrix products in registers, over a block of K and V that was widened
// once for all of them. Q is kept as panels [D][PANEL], so that no product needs a sum across lanes.
#pragma once

#include "columns.h"

constexpr int PANEL = 2 * W;                        // rows
constexpr int PANEL_KEYS = W == 16 ? 64 : 48;       // of a block, a multiple of STRIP
constexpr int STRIP = W == 16 ? 8 : 6;              // rows of a product whose sums fit into registers

// sums[i][0..1] += one[i * stride + n * step] * other[n][0..PANEL)
static inline void product(const float* one, int64_t stride, int64_t step, const float* other, int64_t other_stride, int n, vec (&sums)[STRIP][2]) {
    for (int at = 0; at < n; ++at) {
        const vec a = load(other + at * other_stride), b = load(other + at * other_stride + W);
        for (int i = 0; i < STRIP; ++i) {
            const vec factor = all(one[i * stride + at * step]);
            sums[i][0] += factor * a;
            sums[i][1] += factor * b;
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
            const float* panel = s.q.data() + int64_t(r) * width;
            int low, high;
            seen.bounds(r, PANEL, at_key, num, low, high);
            for (int j = 0; j < PANEL_KEYS; j += STRIP, done += STRIP) {
                fetch(next, num_next * done / total, num_next * (done + STRIP) / total);
                if (j + STRIP <= low || j >= high) continue;
                vec sums[STRIP][2] = {};
                product(s.k.data() + int64_t(j) * width, width, 1, panel, PANEL, width, sums);
                for (int i = 0; i < STRIP; ++i)
                    for (int half = 0; half < 2; ++half) store(s.scores.data() + int64_t(j + i) * padded + r + half * W, sums[i][half]);
            }
        }
    }
    void weigh(const Seen& seen, int key, int num) { weigh_columns(s, seen, c.cap, padded, height, out_width, key, num); }
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
            weigh(seen, key, num);
            gather(seen, key, num);
        }
        for (int r = 0; r < height; ++r) {
            restore(T, s.out.data() + int64_t(r) * out_width, s.row.data(), out_width);
            finish(step, item, item.head, r, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};

static inline void panels(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case F32: return Panels<F32>{step, item, s}.run();
    case BF16: return Panels<BF16>{step, item, s}.run();
    case F16: return Panels<F16>{step, item, s}.run();
    case E4M3: return Panels<E4M3>{step, item, s}.run();
    case E5M2: return Panels<E5M2>{step, item, s}.run();
    }
}
