// Rows of 8-bit floats as bfloat16, which holds each of their values, by tables of both of its bytes.
#pragma once

#include <algorithm>

#include "vectors.h"

#if defined(__AVX512BF16__) && LANES == 16

// Bytes of the bfloat16 of each magnitude (the seven bits after the sign).
struct ByteTable {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    // has_infinity: as e5m2, where e4m3 has one NaN and more values.
    constexpr ByteTable(int mantissa_bits, int bias, bool has_infinity) {
        const int top_exponent = 127 >> mantissa_bits;
        for (int size = 0; size < 128; ++size) {
            const int exponent = size >> mantissa_bits, mantissa = size & ((1 << mantissa_bits) - 1);
            int bits = (exponent - bias + 127) << 7 | mantissa << (7 - mantissa_bits);
            if (exponent == 0) {
                int highest = -1;
                while (mantissa >> (highest + 1)) ++highest;
                bits = mantissa ? (highest + 1 - bias - mantissa_bits + 127) << 7 | ((mantissa << (7 - highest)) & 127) : 0;
            }
            if (has_infinity && exponent == top_exponent) bits = mantissa ? 0x7fc0 : 0x7f80;
            if (!has_infinity && size == 127) bits = 0x7fc0;
            low[size] = uint8_t(bits), high[size] = uint8_t(bits >> 8);
        }
    }
};
alignas(64) static constexpr ByteTable E4M3_TABLE(3, 7, false), E5M2_TABLE(2, 15, true);

// Not all CPUs with AVX-512-BF16 look bytes up.
static inline bool looks_bytes_up() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi");
}
static const bool LOOKS_BYTES_UP = looks_bytes_up();

// What the look-ups need, in registers.
struct ByteTables {
    __m512i low_one, low_other, high_one, high_other, sign;

    explicit ByteTables(const ByteTable& table)
        : low_one(_mm512_load_si512(table.low)), low_other(_mm512_load_si512(table.low + 64)), high_one(_mm512_load_si512(table.high)), high_other(_mm512_load_si512(table.high + 64)), sign(_mm512_set1_epi8(char(0x80))) {}
    // Both bytes of 64 values. The sign's bit is not read by look-ups.
    __attribute__((target("avx512vbmi"))) void find(__m512i bytes, __m512i& low, __m512i& high) const {
        low = _mm512_permutex2var_epi8(low_one, bytes, low_other);
        high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high_one, bytes, high_other), bytes, sign, 0xf8);  // size | (bytes & sign)
    }
};

// The n values of each row `offset` bytes on, then zeros up to `width`, a multiple of 32.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) static inline void look_rows_up(const ByteTable& table, const char* const* rows, int num, int64_t offset, int n, int width, char* to) {
    const ByteTables tables(table);
    const __m512i apart = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that the halves of 128 bits unpack in order
    for (int j = 0; j < num; ++j, to += 2 * width) {
        const char* from = rows[j] + offset;
        for (int d = 0; d < width; d += 64) {
            const int left = std::max(n - d, 0);
            const __m512i plain = left >= 64 ? _mm512_loadu_si512(from + d) : _mm512_maskz_loadu_epi8((__mmask64(1) << left) - 1, from + d);
            const __m512i bytes = _mm512_permutexvar_epi64(apart, plain);
            __m512i low, high;
            tables.find(bytes, low, high);
            _mm512_storeu_si512(to + 2 * d, _mm512_unpacklo_epi8(low, high));
            if (d + 32 < width) _mm512_storeu_si512(to + 2 * d + 64, _mm512_unpackhi_epi8(low, high));
        }
    }
}
#endif
