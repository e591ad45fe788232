// The products of few.h: blocks of keys and a few rows, of bfloat16 or of bytes that are looked up in
// registers.
#pragma once

#include "ahead.h"
#include "lanes.h"

#if defined(__AVX512BF16__) && LANES == 16

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
template <Type T, int P, int V, int J, bool HELD>
static inline void few_logits(const char* const* rows, int64_t offset, const char* q, int width, float scaling, float* logits, int64_t stride, const Next& next, Pace<HELD>& pace) {
    constexpr int L = W / P, SIZE = size_of(T);
    const char* k[J];
    for (int i = 0; i < J; ++i) k[i] = rows[i] + offset;
    vec sums[V][J];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int i = 0; i < J; ++i) sums[v][i] = vec{};
    const Lines<J> lines(next, q);
    Pace<HELD> waits = pace;
    for (int at = 0; at < 2 * width; at += 64) {
#pragma GCC unroll 16
        for (int part = 0; part < P; ++part) {
#pragma GCC unroll 16
            for (int i = part * J / P; i < (part + 1) * J / P; ++i) {
                waits.wait();
                prefetch(lines.of[i] + at * SIZE / 2 * lines.step + waits.after);
            }
            ivec query[V];
            for (int v = 0; v < V; ++v) query[v] = load_ints(q + (int64_t(at) * P + part * 64) * V + v * 64);
#pragma GCC unroll 16
            for (int i = 0; i < J; ++i) {
                const ivec key = repeated<P>(k[i] + at + part * (64 / P));
                for (int v = 0; v < V; ++v) sums[v][i] = add_pairs(sums[v][i], query[v], key);
            }
        }
    }
    pace = waits;
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
template <int P, int R, int C, int N, bool HELD>
static inline void few_mix(const char* const* rows, int64_t offset, const int32_t* weights, int64_t stride, int num, float* out, int64_t block, int d, const Lines<N>& lines, Pace<HELD>& pace) {
    constexpr int L = W / P, GROUP = L / 2;
    vec sums[R][2 * C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = load(out + c / 2 * block + r * BLOCK + c % 2 * W);
    const char* const* of = lines.of;
    Pace<HELD> waits = pace;
    for (int g = 0; g < num; ++g, weights += GROUP * P)
#pragma GCC unroll 8
        for (int p = 0; p < GROUP; ++p, rows += 2, of += 2) {
            const char *one = rows[0] + offset + 2 * d, *other = rows[1] + offset + 2 * d;
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                for (int i = 0; i < 2; ++i) {
                    waits.wait();
                    prefetch(of[i] + 2 * (d + c * BLOCK) * lines.step + waits.after);
                }
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
    pace = waits;
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
#endif
