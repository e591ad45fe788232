// Few queries over 16-bit or 8-bit rows, as products of pairs of bfloat16 (AVX-512-BF16): decoding.
//
// A vector of Q has P rows of L words (of two values), P * L = 16. L words of a key are broadcast, for
// all vectors of Q, so that a logit is the sum of L lanes: those of L keys become one vector, lane =
// row * L + key. V is paired key by key. A few keys at a time meet all heads, as rows are fetched in
// the order of memory.
#pragma once

#include "ahead.h"
#include "columns.h"
#include "lanes.h"

#if defined(__AVX512BF16__) && LANES == 16

constexpr int SPARE_KEYS = W;  // after a block's, as products take several at a time

// The 64 / P bytes at p, P times. P: 2, 4 or 8.
template <int P> static inline ivec repeated(const char* p) {
    if constexpr (P == 2) return (ivec)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    else if constexpr (P == 4) return (ivec)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    else {
        int64_t word;
        std::memcpy(&word, p, 8);
        return (ivec)_mm512_set1_epi64(word);
    }
}

// Logits of J keys and V vectors of rows, those of the second vector `stride` on.
template <Type T, int P, int V, int J>
static inline void few_logits(const char* const* rows, int64_t offset, const char* q, int width, float scaling, float* logits, int64_t stride, const Next& next) {
    constexpr int L = W / P, SIZE = size_of(T);
    const char* k[J];
    for (int i = 0; i < J; ++i) k[i] = rows[i] + offset;
    vec sums[V][J];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int i = 0; i < J; ++i) sums[v][i] = vec{};
    const Lines<J> lines(next, q);
    for (int at = 0; at < 2 * width; at += 64) {
#pragma GCC unroll 16
        for (int part = 0; part < P; ++part) {
#pragma GCC unroll 16
            for (int i = part * J / P; i < (part + 1) * J / P; ++i) prefetch(lines.of[i] + at * SIZE / 2 * lines.step);
            ivec query[V];
            for (int v = 0; v < V; ++v) query[v] = load_ints(q + (int64_t(at) * P + part * 64) * V + v * 64);
#pragma GCC unroll 16
            for (int i = 0; i < J; ++i) {
                const ivec key = repeated<P>(k[i] + at + part * (64 / P));
                for (int v = 0; v < V; ++v) sums[v][i] = add_pairs(sums[v][i], query[v], key);
            }
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int i = 0; i < J; i += L) {
            join<L>(&sums[v][i]);
            store(logits + v * stride + i * P, sums[v][i] * scaling);
        }
}

// Logits of 8 keys in bytes and R rows of `width` values. 16 bytes of 4 keys lie side by side, so that a
// product meets 4 words of each of them; 4 rows and 4 keys become one vector, lane = row * 4 + key.
template <Type T, int R>
__attribute__((target("avx512vbmi"))) static void byte_logits(const char* const* rows, int64_t offset, const char* q, int width, float scaling, float* logits, int64_t stride, const Next& next) {
    constexpr int J = DOT_KEYS, V = J / 4, GROUPS = (R + 3) / 4;
    const ByteTables tables(T == E4M3 ? E4M3_TABLE : E5M2_TABLE);
    const char* k[J];
    for (int i = 0; i < J; ++i) k[i] = rows[i] + offset;
    vec sums[GROUPS * 4][V] = {};
    const Lines<J> lines(next, q);
    for (int at = 0; at < width; at += 16) {
        for (int i = at % 64 / 8; i < at % 64 / 8 + 2; ++i) prefetch(lines.of[i] + at / 64 * 64 * lines.step);
        ivec first[V], last[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            const auto part = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(k[4 * v + i] + at)); };
            __m512i bytes = _mm512_broadcast_i32x4(part(0)), low, high;
            bytes = _mm512_mask_broadcast_i32x4(bytes, 0x00f0, part(1));
            bytes = _mm512_mask_broadcast_i32x4(bytes, 0x0f00, part(2));
            bytes = _mm512_mask_broadcast_i32x4(bytes, 0xf000, part(3));
            tables.find(bytes, low, high);
            first[v] = (ivec)_mm512_unpacklo_epi8(low, high), last[v] = (ivec)_mm512_unpackhi_epi8(low, high);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const char* query = q + 2 * (int64_t(r) * width + at);
            const ivec one = repeated<4>(query), other = repeated<4>(query + 16);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) sums[r][v] = add_pairs(add_pairs(sums[r][v], one, first[v]), other, last[v]);
        }
    }
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            vec each[4] = {sums[4 * g][v], sums[4 * g + 1][v], sums[4 * g + 2][v], sums[4 * g + 3][v]};
            join<4>(each);
            store(logits + g * stride + v * W, (vec)_mm512_permutexvar_ps(turned, (__m512)each[0]) * scaling);
        }
}

// out[r] += weights[r] . V for R rows and C blocks of columns from the d-th on, those of the second
// block `block` floats on. num: groups of L keys.
template <int P, int R, int C, int N>
static inline void few_mix(const char* const* rows, int64_t offset, const int32_t* weights, int64_t stride, int num, float* out, int64_t block, int d, const Lines<N>& lines) {
    constexpr int L = W / P, GROUP = L / 2;
    vec sums[R][2 * C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = load(out + c / 2 * block + r * BLOCK + c % 2 * W);
    const char* const* of = lines.of;
    for (int g = 0; g < num; ++g, weights += GROUP * P)
#pragma GCC unroll 8
        for (int p = 0; p < GROUP; ++p, rows += 2, of += 2) {
            const char *one = rows[0] + offset + 2 * d, *other = rows[1] + offset + 2 * d;
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                for (int i = 0; i < 2; ++i) prefetch(of[i] + 2 * (d + c * BLOCK) * lines.step);
            ivec weight[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) weight[r] = (ivec)_mm512_set1_epi32(weights[r / P * stride + r % P * GROUP + p]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const ivec a = load_ints(one + 64 * c), b = load_ints(other + 64 * c), first = first_pairs(a, b), last = last_pairs(a, b);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    sums[r][2 * c] = add_pairs(sums[r][2 * c], first, weight[r]);
                    sums[r][2 * c + 1] = add_pairs(sums[r][2 * c + 1], last, weight[r]);
                }
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; ++c) store(out + c / 2 * block + r * BLOCK + c % 2 * W, sums[r][c]);
}

// The same for bytes, 64 columns from the d-th on: PARTS halves of each 16 columns, from the first or
// the second on. Bytes of two keys are paired before they become pairs of bfloat16, whose order is
// that of `restore_bytes`.
template <Type T, int P, int R, int PARTS, int N>
__attribute__((target("avx512vbmi"))) static void byte_mix(const char* const* rows, int64_t offset, const int32_t* weights, int64_t stride, int num, float* out, int64_t block, int d, int part, const Lines<N>& lines) {
    constexpr int L = W / P, GROUP = L / 2;
    const ByteTables tables(T == E4M3 ? E4M3_TABLE : E5M2_TABLE);
    vec sums[R][2 * PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * PARTS; ++c) sums[r][c] = load(out + c / 2 * block + r * BLOCK + c % 2 * W);
    const char* const* of = lines.of;
#pragma GCC unroll 2
    for (int g = 0; g < num; ++g, weights += GROUP * P)
#pragma GCC unroll 8
        for (int p = 0; p < GROUP; ++p, rows += 2, of += 2) {
            const __m512i one = _mm512_loadu_si512(rows[0] + offset + d), other = _mm512_loadu_si512(rows[1] + offset + d);
            if (!part)
                for (int i = 0; i < 2; ++i) prefetch(of[i] + d * lines.step);
#pragma GCC unroll 2
            for (int c = 0; c < PARTS; ++c) {
                __m512i low, high;
                tables.find(c + part ? _mm512_unpackhi_epi8(one, other) : _mm512_unpacklo_epi8(one, other), low, high);
                const ivec first = (ivec)_mm512_unpacklo_epi8(low, high), last = (ivec)_mm512_unpackhi_epi8(low, high);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const ivec weight = (ivec)_mm512_set1_epi32(weights[r / P * stride + r % P * GROUP + p]);
                    sums[r][2 * c] = add_pairs(sums[r][2 * c], first, weight);
                    sums[r][2 * c + 1] = add_pairs(sums[r][2 * c + 1], last, weight);
                }
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * PARTS; ++c) store(out + c / 2 * block + r * BLOCK + c % 2 * W, sums[r][c]);
}
// Sums of 64 columns put back: `first` and `second` have those of the halves of each 16.
static inline void restore_bytes(const float* first, const float* second, float* to) {
    for (int i = 0; i < 4; ++i, to += W) {
        for (int part = 0; part < 2; ++part) {
            std::memcpy(to + part * 4, first + part * W + 4 * i, 16);
            std::memcpy(to + 8 + part * 4, second + part * W + 4 * i, 16);
        }
    }
}

// V vectors of P rows for each KV head.
template <Type T, int P, int V> struct Few {
    static constexpr int L = W / P, J = DOT_KEYS, SIZE = size_of(T), KEYS = SIZE == 1 ? 16 : 8;
    static constexpr int LOGITS = (STREAM_KEYS + SPARE_KEYS) * P, WORDS = LOGITS / 2;  // of a vector of rows
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int num_heads = item.head_end - item.head, height = step.height(item);
    const int width = step.width, out_width = step.out_width;
    // Bytes are read where they lie, or copied as bfloat16.
    const bool dots_bytes = SIZE == 1 && P == 4 && LOOKS_BYTES_UP && step.D % (2 * BLOCK) == 0;
    const bool mixes_bytes = SIZE == 1 && LOOKS_BYTES_UP && step.Dv % (2 * BLOCK) == 0;
    const bool copies_k = (T != BF16 && !dots_bytes) || step.D % BLOCK;
    const bool copies_v = (T != BF16 && !mixes_bytes) || step.Dv % BLOCK;
    const int num_vectors = num_heads * V;
    const char* copied[STREAM_KEYS + SPARE_KEYS];

    // A row's sums of the 32 columns from the d-th on: blocks of columns, [height][BLOCK] each.
    float* out_of(int h, int r, int d) const { return s.out.data() + int64_t(h) * height * out_width + int64_t(d) * height + r * BLOCK; }
    void prepare() {
        const int64_t vector_bytes = int64_t(P) * width * 2;
        s.narrow_q.assign(size_t(num_vectors * vector_bytes), 0);
        s.row.resize(std::max(width, out_width));
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                char* row = reinterpret_cast<char*>(s.row.data());
                std::memset(row, 0, size_t(width) * 2);
                step.narrow_query(item, item.head + h, r, row);
                if (dots_bytes) {
                    std::memcpy(s.narrow_q.data() + h * V * vector_bytes + int64_t(r) * width * 2, row, size_t(width) * 2);
                    continue;
                }
                char* to = s.narrow_q.data() + h * V * vector_bytes + r / P * 64 + r % P * L * 4;
                for (int at = 0; at < 2 * width; at += L * 4) std::memcpy(to + int64_t(at) * P * V, row + at, L * 4);
            }
        if (copies_k) s.narrow_k.resize(size_t(STREAM_KEYS) * width * 2);
        if (copies_v) s.narrow_v.resize(size_t(STREAM_KEYS) * out_width * 2);
        s.scores.resize(size_t(num_vectors) * LOGITS);
        s.pairs.resize(size_t(num_vectors) * WORDS);
        s.out.assign(size_t(num_heads) * height * out_width, 0.0f);
        s.top.assign(num_vectors * W, NONE), s.sum.assign(num_vectors * W, 0.0f), s.decay.resize(num_vectors * W);
    }
    // The block's rows of a head in bfloat16, in a multiple of 32 values, `offset` on from the first head's.
    const char* const* narrowed(const char* const* rows, int num, int64_t offset, int n, int to, Aligned<char>& copies) {
        for (int j = 0; j < num; ++j) copied[j] = copies.data() + int64_t(j) * to * 2;
        if (T != BF16 && LOOKS_BYTES_UP) look_rows_up(T == E4M3 ? E4M3_TABLE : E5M2_TABLE, rows, num, offset, n, to, copies.data());
        else for (int j = 0; j < num; ++j) copy_row<T>(rows[j] + offset, n, to, copies.data() + int64_t(j) * to * 2);
        std::fill(copied + num, copied + num + SPARE_KEYS, copied[num - 1]);
        return copied;
    }
    template <int R> void dot_bytes(const char* const* rows, int64_t offset, int h, int j, const Next& next) {
        if (height == R) return byte_logits<T, R>(rows, offset, s.narrow_q.data() + int64_t(h) * V * P * width * 2, width, step.scaling, s.scores.data() + h * V * LOGITS + j * P, LOGITS, next);
        if constexpr (R > 1) dot_bytes<R - 1>(rows, offset, h, j, next);
    }
    void multiply(const Rows<T>& keys, int num) {
        Ahead<T> ahead(keys, step.D, num_heads, height);
        for (int j = 0; j < num; j += J)
            for (int h = 0; h < num_heads; ++h) {
                const Next next = ahead.next(j, h, J, step.D);
                const int64_t offset = h * keys.head_bytes;
                if constexpr (SIZE == 1 && P == 4)
                    if (dots_bytes) {
                        dot_bytes<P * V>(keys.of + j, offset, h, j, next);
                        continue;
                    }
                const char* const* rows = copies_k ? narrowed(keys.of + j, std::min(J, num - j), offset, step.D, width, s.narrow_k) : keys.of + j;
                few_logits<T, P, V, J>(rows, copies_k ? 0 : offset, s.narrow_q.data() + int64_t(h) * V * P * width * 2, width, step.scaling, s.scores.data() + h * V * LOGITS + j * P, LOGITS, next);
            }
    }
    // Removes what rows do not see, in all lanes of a head.
    void hide(const Seen& seen, float* logits, int first_row, int key, int num, int num_groups) const {
        ivec from, to, hidden_from = {}, hidden_to = {}, place;
        for (int i = 0; i < W; ++i) {
            const int r = first_row + i / L;
            from[i] = s.first[r], to[i] = std::min(s.end[r], key + num), place[i] = key + i % L;
            if (c.hidden_from) hidden_from[i] = s.hidden_from[r], hidden_to[i] = s.hidden_to[r];
        }
        for (int v = 0; v < num_groups; ++v, place += L) {
            ivec keep = (from <= place) & (to > place);
            if (c.hidden_from) keep &= (hidden_from > place) | (hidden_to <= place);
            store(logits + v * W, keep ? load(logits + v * W) : all(NONE));
        }
        if (!c.mask) return;
        for (int r = first_row; r < std::min(first_row + P, height); ++r) {
            const int token = seen.token_of(r);
            const uint8_t* keep = c.mask + c.mask_row[token];
            const int64_t start = std::max<int64_t>({c.mask_start[token], s.first[r], key}), end = std::min(s.end[r], key + num);
            for (int64_t k = start; k < end; ++k)
                if (!keep[k]) logits[(k - key) / L * W + r % P * L + (k - key) % L] = NONE;
        }
    }
    // The v-th vector of rows.
    void weigh(const Seen& seen, int v, int key, int num, int num_groups, bool whole) {
        float* logits = s.scores.data() + v * LOGITS;
        int32_t* words = s.pairs.data() + v * WORDS;
        if (c.cap > 0)
            for (int g = 0; g < num_groups; ++g) store(logits + g * W, capped(load(logits + g * W), c.cap));
        if (!whole) hide(seen, logits, v % V * P, key, num, num_groups);
        const vec old = load(&s.top[v * W]);
        vec tops[2] = {old, old};
        for (int g = 0; g < num_groups; ++g) tops[g % 2] = higher(load(logits + g * W), tops[g % 2]);
        const vec top = most_of<L>(higher(tops[0], tops[1])), safe = top == NONE ? all(0.0f) : top, factor = power(old - safe);
        vec sum = load(&s.sum[v * W]) * factor;
        for (int g = 0; g < num_groups; ++g) {
            const vec weights = rough_power(load(logits + g * W) - safe);
            sum += weights;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + g * W / 2), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
        }
        store(&s.top[v * W], top), store(&s.sum[v * W], sum), store(&s.decay[v * W], factor);
    }
    void scale(int h, int r, float decay) {
        if (decay == 1.0f) return;
        float* out = out_of(h, r, 0);
        for (int d = 0; d < out_width; d += BLOCK, out += height * BLOCK) store(out, load(out) * decay), store(out + W, load(out + W) * decay);
    }
    template <int R> void mix(const char* const* rows, int64_t offset, int h, int r, int j, int num_groups, const Lines<KEYS>& lines) {
        constexpr int C = R > 4 ? 1 : R > 2 ? 2 : 4;
        const int32_t* words = s.pairs.data() + (h * V + r / P) * WORDS + j / 2 * P;
        const int64_t block = int64_t(height) * BLOCK;
        if constexpr (SIZE == 1)
            if (mixes_bytes) {
                constexpr int PARTS = R > 4 ? 1 : 2;
                for (int d = 0; d < out_width; d += 2 * BLOCK)
                    for (int part = 0; part < 2; part += PARTS) byte_mix<T, P, R, PARTS>(rows, offset, words, WORDS, num_groups, out_of(h, r, d + part * BLOCK), block, d, part, lines);
                return;
            }
        int d = 0;
        for (; d + C * BLOCK <= out_width; d += C * BLOCK) few_mix<P, R, C>(rows, offset, words, WORDS, num_groups, out_of(h, r, d), block, d, lines);
        for (; d < out_width; d += BLOCK) few_mix<P, R, 1>(rows, offset, words, WORDS, num_groups, out_of(h, r, d), block, d, lines);
    }
    template <int R> void mix_rows(const char* const* rows, int64_t offset, int h, int r, int left, int j, int num_groups, const Lines<KEYS>& lines) {
        if (left == R) return mix<R>(rows, offset, h, r, j, num_groups, lines);
        if constexpr (R > 1) mix_rows<R - 1>(rows, offset, h, r, left, j, num_groups, lines);
    }
    void gather(const Rows<T>& values, int num) {
        Ahead<T> ahead(values, step.Dv, num_heads, height);
        for (int j = 0; j < num; j += KEYS) {
            const int now = std::min(KEYS, num - j), num_groups = round_up(now, L) / L;
            for (int h = 0; h < num_heads; ++h) {
                const Lines<KEYS> lines(c.v ? ahead.next(j, h, KEYS, step.Dv) : Next(), s.out.data()), none(Next(), s.out.data());
                const int64_t offset = h * values.head_bytes;
                const char* const* rows = copies_v ? narrowed(values.of + j, now, offset, step.Dv, out_width, s.narrow_v) : values.of + j;
                for (int r = 0; r < height; r += 8) mix_rows<std::min(P * V, 8)>(rows, copies_v ? 0 : offset, h, r, std::min(8, height - r), j, num_groups, r ? none : lines);
            }
        }
    }
    void run() {
        prepare();
        const Seen seen(step, item, s, W);
        const int32_t* slots = step.slots(item);
        Rows<T> keys, values;
        for (int key = item.key; key < item.key_end; key += STREAM_KEYS) {
            const int left = item.key_end - key, num = std::min(STREAM_KEYS, left), num_groups = round_up(num, L) / L;
            keys.find(step, false, slots + key, left, item.head);
            values.find(step, true, slots + key, left, item.head);
            multiply(keys, num);
            const bool whole = seen.whole(key, num) && num % L == 0;
            for (int v = 0; v < num_vectors; ++v) weigh(seen, v, key, num, num_groups, whole);
            for (int h = 0; h < num_heads; ++h)
                for (int r = 0; r < height; ++r) scale(h, r, s.decay[(h * V + r / P) * W + r % P * L]);
            gather(values, num);
        }
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                if (mixes_bytes)
                    for (int d = 0; d < out_width; d += 2 * BLOCK) restore_bytes(out_of(h, r, d), out_of(h, r, d + BLOCK), s.row.data() + d);
                else
                    for (int d = 0; d < out_width; d += BLOCK) restore_pairs(load(out_of(h, r, d)), load(out_of(h, r, d) + W), s.row.data() + d);
                const int at = (h * V + r / P) * W, lane = r % P * L;
                finish(step, item, item.head + h, r, s.row.data(), s.top[at + lane], total_of<L>(load(&s.sum[at]))[lane]);
            }
    }
};

template <Type T> static inline void few_of(Step& step, const Item& item, Scratch& s) {
    const int height = step.height(item);
    if (size_of(T) == 1 && LOOKS_BYTES_UP && height <= 4) Few<T, 4, 1>{step, item, s}.run();
    else if (height <= 2) Few<T, 2, 1>{step, item, s}.run();
    else if (height <= 4) Few<T, 2, 2>{step, item, s}.run();
    else if (height <= 8) Few<T, 4, 2>{step, item, s}.run();
    else Few<T, 8, 2>{step, item, s}.run();
}
static inline void few(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case E4M3: return few_of<E4M3>(step, item, s);
    case E5M2: return few_of<E5M2>(step, item, s);
    default: return few_of<BF16>(step, item, s);
    }
}
#else
static inline void few(Step&, const Item&, Scratch&) {}
#endif
