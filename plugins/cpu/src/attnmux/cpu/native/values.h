// The types of stored values, widened to float32 and narrowed.
//
// Kernels load 2 W values at a time. A bfloat16 vector is split into its even and its odd values by
// a shift and a mask, which costs no shuffle: its order is "even values, odd values" in every 2 W.
// Q is arranged in the same order, and results are put back when they are written.
#pragma once

#include <algorithm>

#include "bytes.h"
#include "vectors.h"

enum Type : int32_t { F32, BF16, F16, E4M3, E5M2 };

constexpr int size_of(Type type) { return type == F32 ? 4 : type < E4M3 ? 2 : 1; }
constexpr int BLOCK = 2 * W;  // values that are loaded at a time

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 0) {
        const float value = std::ldexp(float(mantissa), -24);
        return sign ? -value : value;
    }
    const uint32_t top = exponent == 31 ? 255 : exponent + 112;
    const uint32_t bits = sign | top << 23 | mantissa << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline vec widen_halves(halves h) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__) && LANES == 8
    return (vec)_mm256_cvtph_ps((__m128i)h);
#else
    vec wide;
    for (int i = 0; i < W; ++i) wide[i] = half_to_float(h[i]);
    return wide;
#endif
}

// The bits of an 8-bit float are those of a float16 after a shift; e4m3 has another bias.
template <Type T> static inline vec widen_bytes(const char* p) {
    const halves b = __builtin_convertvector(*reinterpret_cast<const loose_bytes*>(p), halves);
    if (T == E5M2) return widen_halves(b << 8);
    const halves size = b & 127;
    const halves is_nan = (halves)(size == 127);
    return widen_halves((b & 128) << 8 | size << 7 | is_nan) * 256.0f;
}

// 2 W values of a row from the d-th on, in the order of the type.
template <Type T> static inline void load_block(const char* row, int d, vec& a, vec& b) {
    if constexpr (T == F32) {
        const float* p = reinterpret_cast<const float*>(row) + d;
        a = load(p);
        b = load(p + W);
    } else if constexpr (T == BF16) {
        const ivec words = load_ints(row + 2 * d);
        a = (vec)(words << 16);
        b = (vec)(words & int32_t(0xffff0000));
    } else if constexpr (T == F16) {
        a = widen_halves(*reinterpret_cast<const loose_halves*>(row + 2 * d));
        b = widen_halves(*reinterpret_cast<const loose_halves*>(row + 2 * d + 2 * W));
    } else {
        a = widen_bytes<T>(row + d);
        b = widen_bytes<T>(row + d + W);
    }
}

// The order of type T in rows of a multiple of 2 W values, and back.
static inline void arrange(Type type, const float* from, float* to, int width) {
    if (type != BF16) std::memcpy(to, from, size_t(width) * 4);
    else
        for (int d = 0; d < width; d += BLOCK)
            for (int i = 0; i < W; ++i) to[d + i] = from[d + 2 * i], to[d + W + i] = from[d + 2 * i + 1];
}
static inline void restore(Type type, const float* from, float* to, int width) {
    if (type != BF16) std::memcpy(to, from, size_t(width) * 4);
    else
        for (int d = 0; d < width; d += BLOCK)
            for (int i = 0; i < W; ++i) to[d + 2 * i] = from[d + i], to[d + 2 * i + 1] = from[d + W + i];
}
// n values in the order of the type, followed by zeros up to `width`, a multiple of 2 W.
template <Type T> static inline void widen(const char* row, int n, int width, float* out) {
    int d = 0;
    vec a, b;
    for (; d + BLOCK <= n; d += BLOCK) {
        load_block<T>(row, d, a, b);
        store(out + d, a);
        store(out + d + W, b);
    }
    if (d < n) {
        char rest[BLOCK * size_of(T)] = {};
        std::memcpy(rest, row + d * size_of(T), size_t(n - d) * size_of(T));
        load_block<T>(rest, 0, a, b);
        store(out + d, a);
        store(out + d + W, b);
        d += BLOCK;
    }
    std::fill(out + d, out + std::max(d, width), 0.0f);
}

// A row in bfloat16; the widening of an 8-bit float is exact.
template <Type T> static inline void copy_row(const char* from, int n, int width, char* to) {
    if constexpr (T == BF16) {
        std::memcpy(to, from, size_t(n) * 2);
    } else {
#if defined(__AVX512BF16__) && LANES == 16
        if (LOOKS_BYTES_UP) return look_rows_up(T == E4M3 ? E4M3_TABLE : E5M2_TABLE, &from, 1, 0, n, width, to);
#endif
        int d = 0;
        for (; d + W <= n; d += W)
            *reinterpret_cast<loose_halves*>(to + 2 * d) = __builtin_convertvector((ivec)widen_bytes<T>(from + d) >> 16, halves);
        char rest[W] = {};
        if (d < n) {
            std::memcpy(rest, from + d, size_t(n - d));
            const halves last = __builtin_convertvector((ivec)widen_bytes<T>(rest) >> 16, halves);
            std::memcpy(to + 2 * d, &last, size_t(n - d) * 2);
        }
    }
    std::memset(to + 2 * n, 0, size_t(width - n) * 2);
}

// n values in their own order. `out` has room for a multiple of 2 W.
static inline void widen_query(const char* row, Type type, int n, float* out) {
    float arranged[BLOCK], plain[BLOCK];
    for (int d = 0; d < n; d += BLOCK) {
        const int num = std::min(BLOCK, n - d);
        const char* from = row + int64_t(d) * size_of(type);
        if (type == F32) widen<F32>(from, num, BLOCK, arranged);
        else if (type == BF16) widen<BF16>(from, num, BLOCK, arranged);
        else widen<F16>(from, num, BLOCK, arranged);
        restore(type, arranged, plain, BLOCK);
        std::memcpy(out + d, plain, size_t(num) * 4);
    }
}

static inline uint16_t to_bfloat(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 64;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

static inline uint16_t to_half(float x) {
#if defined(__F16C__)
    return uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const float size = std::fabs(x);
    if (!(size < 65520.0f)) return uint16_t(sign | (size != size ? 0x7e00 : 0x7c00));
    if (size < 6.103515625e-05f) return uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(size, 24))));
    const uint32_t kept = (bits & 0x7fffffff) - (112u << 23);
    return uint16_t(sign | (kept + 0xfff + (kept >> 13 & 1)) >> 13);
#endif
}

static inline void narrow_bfloats(const float* from, uint16_t* out, int n) {
    int i = 0;
    for (; i + W <= n; i += W) {
        const ivec bits = (ivec)load(from + i), rounded = bits + 0x7fff + (bits >> 16 & 1);
        const ivec narrow = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded;
        *reinterpret_cast<loose_halves*>(out + i) = __builtin_convertvector(narrow >> 16, halves);
    }
    for (; i < n; ++i) out[i] = to_bfloat(from[i]);
}

static inline void narrow(const float* from, void* out, Type type, int n) {
    uint16_t* halves_out = static_cast<uint16_t*>(out);
    if (type == F32) std::memcpy(out, from, size_t(n) * 4);
    else if (type == BF16) narrow_bfloats(from, halves_out, n);
    else for (int i = 0; i < n; ++i) halves_out[i] = to_half(from[i]);
}
