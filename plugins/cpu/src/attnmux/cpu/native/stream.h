// Few queries, as in decoding: memory is the bound. Rows of K, then of V, are read once, for all
// query heads of all KV heads of the item, and widened in registers.
//
// A few rows at a time, so that they stay in L1, where rows of a power of two bytes share few sets.
#pragma once

#include "ahead.h"
#include "columns.h"

// scores[j][r] = q[r] . k[j] for R rows and J keys, the row of a key beginning `at` bytes on.
template <Type T, int R, int J>
static inline void dot(const char* q, int64_t q_stride, const char* const* rows, const Next& next, int64_t at, int width, float* scores, int64_t stride) {
    constexpr bool APART = R * J <= 4;  // so few sums would wait for each other
    vec sums[J][R] = {}, more[J][R] = {};
    for (int d = 0; d < width; d += BLOCK) {
        fetch<T, J>(next, d);
        vec a[J], b[J];
        for (int j = 0; j < J; ++j) load_block<T>(rows[j] + at, d, a[j], b[j]);
        for (int r = 0; r < R; ++r) {
            const float* query = reinterpret_cast<const float*>(q + r * q_stride) + d;
            const vec one = load(query), other = load(query + W);
            for (int j = 0; j < J; ++j) sums[j][r] += one * a[j];
            for (int j = 0; j < J; ++j) (APART ? more : sums)[j][r] += other * b[j];
        }
    }
    if (APART)
        for (int j = 0; j < J; ++j)
            for (int r = 0; r < R; ++r) sums[j][r] += more[j][r];
    const vec* flat = &sums[0][0];
    if constexpr (R == 4 && J == 4 && W == 16) {
        const vec all_sums = totals16(flat);
        for (int j = 0; j < J; ++j) std::memcpy(scores + j * stride, reinterpret_cast<const char*>(&all_sums) + 16 * j, 16);
        return;
    }
    for (int i = 0; i < R * J; i += 4) {
        const int last = R * J - 1;
        const vec4 four = totals(flat[i], flat[std::min(i + 1, last)], flat[std::min(i + 2, last)], flat[std::min(i + 3, last)]);
        if constexpr (R == 4) *reinterpret_cast<loose4*>(scores + i / 4 * stride) = four;
        else
            for (int n = 0; n < 4 && i + n < R * J; ++n) scores[(i + n) / R * stride + (i + n) % R] = four[n];
    }
}

// R rows and DOT_KEYS keys: as many at a time as there are registers.
template <Type T, int R>
static inline void dots(const char* q, int64_t q_stride, const char* const* rows, const Next& next, int64_t at, int width, int num, float* scores, int64_t stride) {
    constexpr int J = W == 16 || R < 3 ? 4 : 2;
    for (int j = 0; j < num; j += J) dot<T, R, J>(q, q_stride, rows + j, next.from(j, width * size_of(T)), at, width, scores + j * stride, stride);
}

// out[r] += weights[.][r] . v for R rows, C blocks of columns from the d-th on, and a few keys.
template <Type T, int R, int C>
static inline void mix(const float* weights, int64_t stride, const char* const* rows, const Next& next, int64_t at, int d, int num, float* out, int out_width) {
    for (int c = 0; c < C; ++c) fetch<T, MIX_KEYS>(next, d + c * BLOCK);
    vec sums[R][2 * C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = load(out + r * out_width + d + c * W);
#pragma GCC unroll 4
    for (int j = 0; j < num; ++j)
        for (int c = 0; c < C; ++c) {
            vec a, b;
            load_block<T>(rows[j] + at, d + c * BLOCK, a, b);
            for (int r = 0; r < R; ++r) {
                const vec weight = all(weights[j * stride + r]);
                sums[r][2 * c] += weight * a;
                sums[r][2 * c + 1] += weight * b;
            }
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2 * C; ++c) store(out + r * out_width + d + c * W, sums[r][c]);
}

template <Type T, int R>
static inline void mixes(const float* weights, int64_t stride, const char* const* rows, const Next& next, int64_t at, int num, float* out, int out_width) {
    constexpr int C = (R > 2 ? 1 : R == 2 ? 2 : 4) * (W == 16 ? 2 : 1);
    int d = 0;
    for (; d + C * BLOCK <= out_width; d += C * BLOCK) mix<T, R, C>(weights, stride, rows, next, at, d, num, out, out_width);
    for (; d < out_width; d += BLOCK) mix<T, R, 1>(weights, stride, rows, next, at, d, num, out, out_width);
}

template <Type T> struct Stream {
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int num_heads = item.head_end - item.head, height = step.height(item), num_rows = num_heads * height;
    const int padded = round_up(num_rows, W), width = step.width, out_width = step.out_width;
    const int64_t q_stride = int64_t(width) * 4;

    void prepare() {
        s.narrow_q.resize(size_t(num_rows * q_stride));
        s.out.assign(size_t(num_rows) * out_width, 0.0f);
        s.scores.assign(size_t(STREAM_KEYS + DOT_KEYS) * padded, 0.0f);
        s.top.assign(padded, NONE), s.sum.assign(padded, 0.0f), s.decay.resize(padded);
        s.row.resize(std::max(width, out_width) + BLOCK);
        for (int r = 0; r < num_rows; ++r) {
            char* row = s.narrow_q.data() + r * q_stride;
            step.query(item, item.head + r / height, r % height, s.row.data());
            for (int d = 0; d < width; d += W) store(s.row.data() + d, load(s.row.data() + d) * step.scaling);
            arrange(T, s.row.data(), reinterpret_cast<float*>(row), width);
        }
    }
    // f<R>(first row) for the rows of a KV head, 4 at a time.
    template <typename F> void by_rows(int head, F f) {
        int r = head * height;
        const int end = r + height;
        for (; r + 4 <= end; r += 4) f(std::integral_constant<int, 4>(), r);
        if (end - r == 3) f(std::integral_constant<int, 3>(), r);
        if (end - r == 2) f(std::integral_constant<int, 2>(), r);
        if (end - r == 1) f(std::integral_constant<int, 1>(), r);
    }
    void multiply(const Rows<T>& keys, int num) {
        Ahead<T> ahead(keys, step.D, num_heads, height);
        for (int j = 0; j < num; j += DOT_KEYS)
            for (int h = 0; h < num_heads; ++h) {
                Next next = ahead.next(j, h, DOT_KEYS, step.D);
                by_rows(h, [&](auto R, int r) {
                    dots<T, decltype(R)::value>(s.narrow_q.data() + r * q_stride, q_stride, keys.of + j, next, h * keys.head_bytes, width, std::min(DOT_KEYS, num - j), s.scores.data() + int64_t(j) * padded + r, padded);
                    next = {};
                });
            }
    }
    void gather(const Rows<T>& values, int num) {
        Ahead<T> ahead(values, step.Dv, num_heads, height);
        for (int j = 0; j < num; j += MIX_KEYS)
            for (int h = 0; h < num_heads; ++h) {
                Next next = c.v ? ahead.next(j, h, MIX_KEYS, step.Dv) : Next();
                by_rows(h, [&](auto R, int r) {
                    mixes<T, decltype(R)::value>(s.scores.data() + int64_t(j) * padded + r, padded, values.of + j, next, h * values.head_bytes, std::min(MIX_KEYS, num - j), s.out.data() + int64_t(r) * out_width, out_width);
                    next = {};
                });
            }
    }
    void run() {
        prepare();
        const Seen seen(step, item, s, padded);
        const int32_t* slots = step.slots(item);
        Rows<T> keys, values;
        for (int key = item.key; key < item.key_end; key += STREAM_KEYS) {
            const int left = item.key_end - key, num = std::min(STREAM_KEYS, left);
            keys.find(step, false, slots + key, left, item.head);
            values.find(step, true, slots + key, left, item.head);
            if (step.D % BLOCK) keys.pad(num, num_heads, step.D, s.narrow_k);
            multiply(keys, num);
            weigh_all(step, s, seen, padded, num_rows, key, num);
            if (step.Dv % BLOCK) values.pad(num, num_heads, step.Dv, s.narrow_v);
            gather(values, num);
        }
        for (int r = 0; r < num_rows; ++r) {
            const float* out = s.out.data() + int64_t(r) * out_width;
            restore(T, out, s.row.data(), out_width);
            finish(step, item, item.head + r / height, r % height, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};
static inline void stream(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case F32: return Stream<F32>{step, item, s}.run();
    case BF16: return Stream<BF16>{step, item, s}.run();
    case F16: return Stream<F16>{step, item, s}.run();
    case E4M3: return Stream<E4M3>{step, item, s}.run();
    case E5M2: return Stream<E5M2>{step, item, s}.run();
    }
}
