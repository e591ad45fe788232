// Vectors of floats in GCC's vector extension, as wide as the target has them, and functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Lanes can be given to the compiler, so that kernels for wide vectors can be tried on any CPU.
#if !defined(LANES)
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

constexpr int W = LANES;
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef int32_t loose_ints __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * W)));
typedef uint16_t loose_halves __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef uint8_t loose_bytes __attribute__((vector_size(W), aligned(1), may_alias));
typedef float vec4 __attribute__((vector_size(16)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float loose4 __attribute__((vector_size(16), aligned(4), may_alias));

static inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
// Not `vec{} + x`, which turns -0 into 0, so that the compiler adds for each broadcast.
static inline vec all(float x) { return x - vec{}; }
static inline ivec load_ints(const void* p) { return *reinterpret_cast<const loose_ints*>(p); }
static constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }
// `other` where one of them is NaN.
static inline vec higher(vec one, vec other) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_max_ps((__m512)one, (__m512)other);
#elif defined(__AVX2__) && LANES == 8
    return (vec)_mm256_max_ps((__m256)one, (__m256)other);
#else
    return one > other ? one : other;
#endif
}

// An EPYC with AVX-512 (Zen 4) drops what the first cache has no room to wait for, and decodes 1.2 to
// 1.6 times as fast when the second one fetches. CPUs with AVX2 or AMX were measured with the first.
#if defined(__AVX512F__) && !defined(__AMX_BF16__)
constexpr bool FETCHES_FAR = true;
#else
constexpr bool FETCHES_FAR = false;
#endif

// Into the first cache, or into the second. g++ takes a function that only prefetches for one without
// effects, and removes the calls of it: the empty statement is an effect.
static inline void prefetch(const void* p) {
    __builtin_prefetch(p, 0, FETCHES_FAR ? 2 : 3);
    asm volatile("");
}

static inline bool any(ivec truths) {
    int32_t found = 0;
    for (int i = 0; i < W; ++i) found |= truths[i];
    return found != 0;
}

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// 2^x within 2 units in the last place for x <= 0, exact at 0, and 0 below -126.5. NaN stays NaN.
// The polynomial is of least relative error for exponents from -1/2 to 1/2.
static inline vec power(vec x) {
    constexpr float SHIFT = 12582912.0f + 127;  // rounds to an integer, plus the bias, in the low bits
    x = higher(all(-127.0f), x);
    const vec shifted = x + SHIFT;
    const vec part = x - (shifted - SHIFT);
    vec y = all(0.001326472731f);
    y = y * part + 0.009671512991f;
    y = y * part + 0.05550733581f;
    y = y * part + 0.2402224243f;
    y = y * part + 0.6931470037f;
    y = y * part + 1.0f;
    return y * (vec)((ivec)shifted << 23);
}

// The same within 3e-6, for weights that are rounded to bfloat16. Below -126 it is less than 2e-38.
static inline vec rough_power(vec x) {
    constexpr float SHIFT = 12582912.0f;  // rounds to an integer in the low bits
    x = higher(all(-127.0f), x);
    const vec shifted = x + SHIFT;
    const vec part = x - (shifted - SHIFT);
    vec y = all(0.009582853169f);
    y = y * part + 0.05590642504f;
    y = y * part + 0.2402409861f;
    y = y * part + 0.6931241934f;
    y = y * part + 1.0f;
    return (vec)((ivec)y + ((ivec)shifted << 23));  // at -127: 0
}

// cap * tanh(x / cap) / ln 2, within a few roundings of `cap`.
static inline vec capped(vec x, float cap) {
    const vec size = x < 0.0f ? -x : x;
    const vec e = power(size * (-2.0f * LOG2_E / cap));
    const vec bent = (1.0f - e) / (1.0f + e) * (cap * LOG2_E);
    return x < 0.0f ? -bent : bent;
}

static inline float total(vec v) {
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += v[i];
    return sum;
}

// The totals of four vectors, in order.
static inline vec4 totals(vec4 a, vec4 b, vec4 c, vec4 d) {
    const vec4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const vec4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

#if LANES >= 8
static inline vec4 totals(vec8 a, vec8 b, vec8 c, vec8 d) {
    const vec8 ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const vec8 cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const vec8 sums = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}
#endif
#if LANES == 16
static inline vec8 halved(vec v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vec4 totals(vec a, vec b, vec c, vec d) { return totals(halved(a), halved(b), halved(c), halved(d)); }

// Each quarter's totals of four vectors, in its order.
static inline vec quarter_totals(const vec* x) {
#define PART(a, b, p, q) __builtin_shufflevector(a, b, p, 16 + p, q, 16 + q, 4 + p, 20 + p, 4 + q, 20 + q, 8 + p, 24 + p, 8 + q, 24 + q, 12 + p, 28 + p, 12 + q, 28 + q)
    const vec ab = PART(x[0], x[1], 0, 1) + PART(x[0], x[1], 2, 3), cd = PART(x[2], x[3], 0, 1) + PART(x[2], x[3], 2, 3);
#undef PART
#define PART(p) __builtin_shufflevector(ab, cd, p, 1 + p, 16 + p, 17 + p, 4 + p, 5 + p, 20 + p, 21 + p, 8 + p, 9 + p, 24 + p, 25 + p, 12 + p, 13 + p, 28 + p, 29 + p)
    return PART(0) + PART(2);
#undef PART
}
// The totals of 16 vectors, in order.
static inline vec totals16(const vec* x) {
    const vec a = quarter_totals(x), b = quarter_totals(x + 4), c = quarter_totals(x + 8), d = quarter_totals(x + 12);
#define PART(a, b, p, q) __builtin_shufflevector(a, b, p, 1 + p, 2 + p, 3 + p, q, 1 + q, 2 + q, 3 + q, 16 + p, 17 + p, 18 + p, 19 + p, 16 + q, 17 + q, 18 + q, 19 + q)
    const vec ab = PART(a, b, 0, 4) + PART(a, b, 8, 12), cd = PART(c, d, 0, 4) + PART(c, d, 8, 12);
    return PART(ab, cd, 0, 8) + PART(ab, cd, 4, 12);
#undef PART
}

// The words of 16 vectors turned round.
static inline void turn(ivec (&x)[16]) {
    for (int i = 0; i < 16; i += 2) {
        const ivec a = x[i], b = x[i + 1];
        x[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        x[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int at = 0; at < 16; ++at) {
        const int i = at, j = at + 2;
        if (at & 2) continue;
        const ivec a = x[i], b = x[j];
        x[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        x[j] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int at = 0; at < 16; ++at) {
        const int i = at, j = at + 4;
        if (at & 4) continue;
        const ivec a = x[i], b = x[j];
        x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        x[j] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 8; ++i) {
        const ivec a = x[i], b = x[i + 8];
        x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}
#else
static inline vec totals16(const vec* x) { return x[0]; }
#endif

// A fused product of bfloat16 pairs, added to float32.
#if defined(__AVX512BF16__) && LANES == 16
constexpr bool HAS_PAIRS = true;
static inline vec add_pairs(vec sum, ivec a, ivec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
// The values of two rows side by side: of each 8 columns, the first 4 and the last 4.
static inline ivec first_pairs(ivec a, ivec b) { return (ivec)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
static inline ivec last_pairs(ivec a, ivec b) { return (ivec)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
// Sums of 32 columns put back from that order.
static inline void restore_pairs(vec first, vec last, float* to) {
    store(to, __builtin_shufflevector(first, last, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(to + W, __builtin_shufflevector(first, last, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}
// 2^x within 5e-6, plus half a unit of bfloat16, so that its upper half is the rounded weight.
static inline vec weight_of(vec x) {
    constexpr float SHIFT = 12582912.0f;  // leaves an integer in the low bits
    x = higher(all(-127.0f), x);
    const vec shifted = (vec)_mm512_add_round_ps((__m512)x, _mm512_set1_ps(SHIFT), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const vec part = x - (shifted - SHIFT);
    vec y = all(0.01353097f);
    y = y * part + 0.05201713f;
    y = y * part + 0.24144037f;
    y = y * part + 0.69300354f;
    y = y * part + (1.0f + 1.0f / 256);
    return (vec)((ivec)y + ((ivec)shifted << 23));
}
// Words of two such weights.
static inline ivec upper_halves(vec one, vec other) {
    return (ivec)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)one, 16), (__m512i)other);
}
#else
constexpr bool HAS_PAIRS = false;
static inline vec add_pairs(vec sum, ivec, ivec) { return sum; }
static inline ivec first_pairs(ivec a, ivec) { return a; }
static inline ivec last_pairs(ivec a, ivec) { return a; }
static inline void restore_pairs(vec, vec, float*) {}
#endif

// Words of two weights each, rounded to bfloat16.
static inline ivec rounded_pairs(vec one, vec other) {
    typedef uint32_t words __attribute__((vector_size(4 * W)));
    return (ivec)(((words)one + 0x8000) >> 16) | (((ivec)other + 0x8000) & int32_t(0xffff0000));
}
