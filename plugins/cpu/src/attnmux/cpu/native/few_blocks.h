// The sums over V of few.h for all keys of a block, 8 at a time: they stay in registers, where those of
// few_products.h are loaded and stored again for each 8 or 16 keys. Reading is not what bounds then.
#pragma once

#include "few_products.h"

#if defined(__AVX512BF16__) && LANES == 16

// What is fetched meanwhile, in the order in which it is read. RUN: as many bytes as 8 rows have there,
// from of[j / 8] on; else those of row of[j], `at` on.
template <bool RUN> struct Course {
    const char* const* of;
    int64_t at;

    // Beside the p-th pair of the 8 rows from the j-th on.
    template <int LINES> void fetch(int j, int p) const {
#pragma GCC unroll 8
        for (int i = 0; i < 2 * LINES; ++i) {
            if constexpr (RUN) prefetch(of[j / 8] + (p * 2 * LINES + i) * 64);
            else prefetch(of[j + 2 * p + i / LINES] + at + i % LINES * 64);
        }
    }
};

// The word of row r's weights for the p-th pair of 8 keys.
template <int P> static constexpr int64_t weight_at(int r, int p, int64_t stride) {
    constexpr int GROUP = W / P / 2;
    return r / P * stride + p / GROUP * GROUP * P + r % P * GROUP + p % GROUP;
}
template <int R, int C> static inline void load_scaled(vec (&sums)[R][2 * C], const float* out, int64_t block, const float* decay) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = load(out + c / 2 * block + r * BLOCK + c % 2 * W) * all(decay[r]);
}
template <int R, int C> static inline void store_sums(const vec (&sums)[R][2 * C], float* out, int64_t block) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; ++c) store(out + c / 2 * block + r * BLOCK + c % 2 * W, sums[r][c]);
}

// out[r] = out[r] * decay[r] + weights[r] . V for R rows and C blocks of 32 columns, those of the second
// block `block` floats on. num: keys, a multiple of 8.
template <int P, int R, int C, bool RUN>
static inline void block_mix(const char* const* rows, int64_t offset, const int32_t* weights, int64_t stride, int num, const float* decay, float* out, int64_t block, const Course<RUN>& course) {
    vec sums[R][2 * C];
    load_scaled<R, C>(sums, out, block, decay);
    for (int j = 0; j < num; j += 8, weights += 4 * P)
#pragma GCC unroll 4
        for (int p = 0; p < 4; ++p) {
            const char *one = rows[j + 2 * p] + offset, *other = rows[j + 2 * p + 1] + offset;
            course.template fetch<C>(j, p);
            ivec weight[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) weight[r] = (ivec)_mm512_set1_epi32(weights[weight_at<P>(r, p, stride)]);
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
    store_sums<R, C>(sums, out, block);
}

// The same for bytes, 64 columns, or the half of them that byte_mix calls `part`.
template <Type T, int P, int R, int PARTS, bool RUN>
__attribute__((target("avx512vbmi"))) static void byte_block_mix(const char* const* rows, int64_t offset, const int32_t* weights, int64_t stride, int num, const float* decay, float* out, int64_t block, int part, const Course<RUN>& course) {
    const ByteTables tables(T == E4M3 ? E4M3_TABLE : E5M2_TABLE);
    vec sums[R][2 * PARTS];
    load_scaled<R, PARTS>(sums, out, block, decay);
    for (int j = 0; j < num; j += 8, weights += 4 * P)
#pragma GCC unroll 4
        for (int p = 0; p < 4; ++p) {
            const __m512i one = _mm512_loadu_si512(rows[j + 2 * p] + offset), other = _mm512_loadu_si512(rows[j + 2 * p + 1] + offset);
            if (!part) course.template fetch<1>(j, p);
#pragma GCC unroll 2
            for (int c = 0; c < PARTS; ++c) {
                __m512i low, high;
                tables.find(c + part ? _mm512_unpackhi_epi8(one, other) : _mm512_unpacklo_epi8(one, other), low, high);
                const ivec first = (ivec)_mm512_unpacklo_epi8(low, high), last = (ivec)_mm512_unpackhi_epi8(low, high);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const ivec weight = (ivec)_mm512_set1_epi32(weights[weight_at<P>(r, p, stride)]);
                    sums[r][2 * c] = add_pairs(sums[r][2 * c], first, weight);
                    sums[r][2 * c + 1] = add_pairs(sums[r][2 * c + 1], last, weight);
                }
            }
        }
    store_sums<R, PARTS>(sums, out, block);
}
#endif
