// Few queries, as in decoding: memory is the bound. Rows of K, then of V, are read once, for all
// query heads of all KV heads of the item, and widened in registers.
//
// While a block of K is multiplied, its rows of V are fetched, and while those are, the next block of K.
#pragma once

#include "step.h"

constexpr int STREAM_KEYS = 4 * W;  // of a block

// Fetches rows one after another, a few lines at each call.
struct Ahead {
    const char* const* rows;
    int num, row;
    int64_t nbytes, at;

    Ahead(const char* const* of, int count, int64_t bytes) : rows(of), num(count), row(0), nbytes(bytes), at(0) {}
    void fetch(int lines) {
        for (; lines > 0 && row < num; --lines) {
            __builtin_prefetch(rows[row] + at);
            at += 64;
            if (at >= nbytes) at = 0, ++row;
        }
    }
    // Lines at each of so many calls.
    int pace(int64_t calls) const { return int((num * ((nbytes + 63) / 64) + calls - 1) / calls); }
};

// scores[r][j] = q[r] . k[j] for R rows and J keys, the row of a key beginning `at` bytes on.
template <Type T, bool PAIRS, int R, int J>
static inline void dot(const char* q, int64_t q_stride, const char* const* rows, int64_t at, int width, float* scores) {
    vec sums[R][J] = {};
    for (int d = 0; d < width; d += BLOCK) {
        if constexpr (PAIRS) {
            ivec keys[J];
            for (int j = 0; j < J; ++j) keys[j] = load_ints(rows[j] + at + 2 * d);
            for (int r = 0; r < R; ++r) {
                const ivec query = load_ints(q + r * q_stride + 2 * d);
                for (int j = 0; j < J; ++j) sums[r][j] = add_pairs(sums[r][j], query, keys[j]);
            }
        } else {
            vec a[J], b[J];
            for (int j = 0; j < J; ++j) load_block<T>(rows[j] + at, d, a[j], b[j]);
            for (int r = 0; r < R; ++r) {
                const float* query = reinterpret_cast<const float*>(q + r * q_stride) + d;
                const vec one = load(query), other = load(query + W);
                for (int j = 0; j < J; ++j) sums[r][j] += one * a[j];
                for (int j = 0; j < J; ++j) sums[r][j] += other * b[j];
            }
        }
    }
    if constexpr (J == 4) {
        for (int r = 0; r < R; ++r)
            *reinterpret_cast<loose4*>(scores + r * STREAM_KEYS) = totals(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    } else {
        for (int r = 0; r < R; r += 2) {
            const int next = r + 1 < R ? r + 1 : r;
            const vec4 four = totals(sums[r][0], sums[r][1], sums[next][0], sums[next][1]);
            for (int j = 0; j < 2; ++j) scores[r * STREAM_KEYS + j] = four[j];
            for (int j = 0; j < 2; ++j) scores[next * STREAM_KEYS + j] = four[2 + j];
        }
    }
}

// R rows and 4 keys: as many at a time as there are registers.
template <Type T, bool PAIRS, int R>
static inline void dots(const char* q, int64_t q_stride, const char* const* rows, int64_t at, int width, float* scores) {
    if constexpr (W == 16 || R < 3) {
        dot<T, PAIRS, R, 4>(q, q_stride, rows, at, width, scores);
    } else {
        dot<T, PAIRS, R, 2>(q, q_stride, rows, at, width, scores);
        dot<T, PAIRS, R, 2>(q, q_stride, rows + 2, at, width, scores + 2);
    }
}

// out[r] += weights[r] . v for R rows and C blocks of columns from the d-th on.
template <Type T, int R, int C>
static inline void mix(const float* weights, const char* const* rows, int64_t at, int d, int num, float* out, int out_width, Ahead& ahead, int lines) {
    vec sums[R][2 * C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = load(out + r * out_width + d + c * W);
    for (int j = 0; j < num; ++j) {
        ahead.fetch(lines);
        for (int c = 0; c < C; ++c) {
            vec a, b;
            load_block<T>(rows[j] + at, d + c * BLOCK, a, b);
            for (int r = 0; r < R; ++r) {
                const vec weight = all(weights[r * STREAM_KEYS + j]);
                sums[r][2 * c] += weight * a;
                sums[r][2 * c + 1] += weight * b;
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2 * C; ++c) store(out + r * out_width + d + c * W, sums[r][c]);
}

template <Type T, int R>
static inline void mixes(const float* weights, const char* const* rows, int64_t at, int num, float* out, int out_width, Ahead& ahead, int lines) {
    constexpr int C = W == 16 ? 2 : 1;
    int d = 0;
    for (; d + C * BLOCK <= out_width; d += C * BLOCK) mix<T, R, C>(weights, rows, at, d, num, out, out_width, ahead, lines);
    for (; d < out_width; d += BLOCK) mix<T, R, 1>(weights, rows, at, d, num, out, out_width, ahead, lines);
}

// Removes what a token does not see of a block that begins at `key`.
static inline void hide(const Call& c, int token, float* scores, int64_t key, int num) {
    const int64_t low = c.first[token] - key, high = c.end[token] - key;
    for (int64_t j = 0; j < std::min<int64_t>(low, num); ++j) scores[j] = NONE;
    for (int64_t j = std::max<int64_t>(high, 0); j < num; ++j) scores[j] = NONE;
    if (c.hidden_from)
        for (int64_t j = std::max<int64_t>(c.hidden_from[token] - key, 0); j < std::min<int64_t>(c.hidden_to[token] - key, num); ++j) scores[j] = NONE;
    if (c.mask) {
        const uint8_t* keep = c.mask + c.mask_row[token] + key;
        const int64_t masked = std::max(low, c.mask_start[token] - key);
        for (int64_t j = std::max<int64_t>(masked, 0); j < std::min<int64_t>(high, num); ++j)
            if (!keep[j]) scores[j] = NONE;
    }
}

// Turns a row's logits into weights, and scales what was summed before to them.
static inline void soften(float* scores, float* top, float* sum, float* out, int out_width) {
    vec highest = load(scores);
    for (int j = W; j < STREAM_KEYS; j += W) highest = higher(load(scores + j), highest);
    float most = *top;
    for (int i = 0; i < W; ++i) most = highest[i] > most || highest[i] != highest[i] ? highest[i] : most;
    if (most == NONE) {
        std::fill(scores, scores + STREAM_KEYS, 0.0f);
        return;
    }
    if (most != *top) {
        const float decay = std::exp(*top - most);
        *sum *= decay;
        for (int d = 0; d < out_width; d += W) store(out + d, load(out + d) * decay);
        *top = most;
    }
    vec sums = {};
    for (int j = 0; j < STREAM_KEYS; j += W) {
        const vec weights = exponential(load(scores + j) - most);
        store(scores + j, weights);
        sums += weights;
    }
    *sum += total(sums);
}

// Rows of a block of keys: where they lie, or copies with zeros behind them where their width is
// not what is loaded at a time.
template <Type T> struct Rows {
    const char* of[STREAM_KEYS];
    int64_t head_bytes;

    void find(const Step& step, bool values, const int32_t* slots, int num, int head) {
        head_bytes = (values && step.call.v ? step.call.v_head : step.call.k_head) * size_of(T);
        for (int j = 0; j < num; ++j) of[j] = values ? step.value_row(slots[j], head) : step.key_row(slots[j], head);
        for (int j = num; j % 4; ++j) of[j] = of[num - 1];
    }
    void pad(int num, int num_heads, int n, std::vector<char>& copies) {
        const int64_t bytes = round_up(n, BLOCK) * size_of(T);
        copies.assign(size_t(STREAM_KEYS * num_heads * bytes), 0);
        for (int j = 0; j < round_up(num, 4); ++j) {
            char* copy = copies.data() + j * num_heads * bytes;
            for (int h = 0; h < num_heads; ++h) std::memcpy(copy + h * bytes, of[j] + h * head_bytes, size_t(n) * size_of(T));
            of[j] = copy;
        }
        head_bytes = bytes;
    }
    int64_t span(int num_heads, int n) const { return (num_heads - 1) * head_bytes + n * size_of(T); }
};

template <Type T, bool PAIRS> struct Stream {
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int num_heads = item.head_end - item.head, height = step.height(item), num_rows = num_heads * height;
    const int width = step.width, out_width = step.out_width;
    const int64_t q_stride = int64_t(width) * (PAIRS ? 2 : 4);

    void prepare() {
        s.narrow_q.resize(size_t(num_rows * q_stride));
        s.out.assign(size_t(num_rows) * out_width, 0.0f);
        s.scores.assign(size_t(num_rows) * STREAM_KEYS, 0.0f);
        s.top.assign(num_rows, NONE);
        s.sum.assign(num_rows, 0.0f);
        s.row.resize(std::max(width, out_width) + BLOCK);
        for (int r = 0; r < num_rows; ++r) {
            char* row = s.narrow_q.data() + r * q_stride;
            step.query(item, item.head + r / height, r % height, s.row.data());
            if (PAIRS) {
                narrow(s.row.data(), row, BF16, width);
            } else {
                for (int d = 0; d < width; ++d) s.row[d] *= c.scaling;
                arrange(T, s.row.data(), reinterpret_cast<float*>(row), width);
            }
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
    void multiply(const Rows<T>& keys, int num, Ahead& ahead) {
        const int lines = ahead.pace(int64_t(round_up(num, 4) / 4) * num_heads);
        for (int j = 0; j < num; j += 4)
            for (int h = 0; h < num_heads; ++h) {
                ahead.fetch(lines);
                by_rows(h, [&](auto R, int r) {
                    dots<T, PAIRS, decltype(R)::value>(s.narrow_q.data() + r * q_stride, q_stride, keys.of + j, h * keys.head_bytes, width, s.scores.data() + r * STREAM_KEYS + j);
                });
            }
    }
    void weigh(int64_t key, int num) {
        for (int r = 0; r < num_rows; ++r) {
            float* scores = s.scores.data() + r * STREAM_KEYS;
            if (PAIRS)
                for (int j = 0; j < STREAM_KEYS; j += W) store(scores + j, load(scores + j) * c.scaling);
            if (c.cap > 0)
                for (int j = 0; j < STREAM_KEYS; j += W) store(scores + j, capped(load(scores + j), c.cap));
            hide(c, step.first_token(item) + r % height / step.group, scores, key, num);
            std::fill(scores + num, scores + STREAM_KEYS, NONE);
            soften(scores, &s.top[r], &s.sum[r], s.out.data() + int64_t(r) * out_width, out_width);
        }
    }
    void gather(const Rows<T>& values, int num, Ahead& ahead) {
        const int lines = ahead.pace(int64_t(num_heads) * (out_width / BLOCK / (W == 16 ? 2 : 1) + 1) * num);
        for (int h = 0; h < num_heads; ++h)
            by_rows(h, [&](auto R, int r) {
                mixes<T, decltype(R)::value>(s.scores.data() + r * STREAM_KEYS, values.of, h * values.head_bytes, num, s.out.data() + int64_t(r) * out_width, out_width, ahead, lines);
            });
    }
    void run() {
        prepare();
        const int32_t* slots = step.slots(item);
        Rows<T> keys, values, next;
        const int first = std::min(STREAM_KEYS, item.key_end - item.key);
        if (first > 0) {
            next.find(step, false, slots + item.key, first, item.head);
            Ahead(next.of, first, next.span(num_heads, step.D)).fetch(1 << 30);
        }
        for (int key = item.key; key < item.key_end; key += STREAM_KEYS) {
            const int num = std::min(STREAM_KEYS, item.key_end - key), left = item.key_end - key - num;
            keys = next;
            values.find(step, true, slots + key, num, item.head);
            Ahead to_values(values.of, c.v ? num : 0, values.span(num_heads, step.Dv));
            if (step.D % BLOCK) keys.pad(num, num_heads, step.D, s.narrow_k);
            multiply(keys, num, to_values);
            weigh(key, num);
            if (left) next.find(step, false, slots + key + num, std::min(STREAM_KEYS, left), item.head);
            Ahead to_keys(next.of, std::min(STREAM_KEYS, left), next.span(num_heads, step.D));
            if (step.Dv % BLOCK) values.pad(num, num_heads, step.Dv, s.narrow_v);
            gather(values, num, to_keys);
        }
        for (int r = 0; r < num_rows; ++r) {
            restore(T, s.out.data() + int64_t(r) * out_width, s.row.data(), out_width);
            finish(step, item, item.head + r / height, r % height, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};

static inline void stream(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case F32: return Stream<F32, false>{step, item, s}.run();
    case BF16:
        if (HAS_PAIRS && step.q_type == BF16) return Stream<BF16, HAS_PAIRS>{step, item, s}.run();
        return Stream<BF16, false>{step, item, s}.run();
    case F16: return Stream<F16, false>{step, item, s}.run();
    case E4M3: return Stream<E4M3, false>{step, item, s}.run();
    case E5M2: return Stream<E5M2, false>{step, item, s}.run();
    }
}
