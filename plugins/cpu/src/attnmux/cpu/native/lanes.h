// Sums and maxima of lanes of AVX-512 vectors that differ by one bit of their number, or by several.
#pragma once

#include "vectors.h"

#if defined(__AVX512F__) && LANES == 16

template <int S> static inline __m512 swapped(__m512 x) {
    if constexpr (S == 1) return _mm512_permute_ps(x, 0xb1);
    else if constexpr (S == 2) return _mm512_permute_ps(x, 0x4e);
    else if constexpr (S == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    else return _mm512_shuffle_f32x4(x, x, 0x4e);
}
// Sums of lanes that differ by S: those of `a` where bit S of the lane is 0, else those of `b`.
template <int S> static inline vec joined(vec a, vec b) {
    constexpr __mmask16 ODD = S == 1 ? 0xaaaa : S == 2 ? 0xcccc : S == 4 ? 0xf0f0 : 0xff00;
    const __m512 kept = _mm512_mask_blend_ps(ODD, (__m512)a, (__m512)b), other = _mm512_mask_blend_ps(ODD, (__m512)b, (__m512)a);
    return (vec)_mm512_add_ps(kept, swapped<S>(other));
}
// x[0]: the sums of N vectors, each over N lanes next to each other.
template <int N, int S = 1> static inline void join(vec* x) {
    if constexpr (N > S) {
        for (int i = 0; i < N / S; i += 2) x[i / 2] = joined<S>(x[i], x[i + 1]);
        join<N, 2 * S>(x);
    }
}
template <int N, int S = 1> static inline vec most_of(vec x) {
    if constexpr (N > S) return most_of<N, 2 * S>(higher(x, (vec)swapped<S>((__m512)x)));
    else return x;
}
template <int N, int S = 1> static inline vec total_of(vec x) {
    if constexpr (N > S) return total_of<N, 2 * S>(x + (vec)swapped<S>((__m512)x));
    else return x;
}
#endif
