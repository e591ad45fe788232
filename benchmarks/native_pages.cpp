// Reads pages of K and V as decoding does, with as many products of bfloat16 pairs for each line, and does
// nothing else: what bounds a kernel with this access. Compiled and run by native_pages.py.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

constexpr int64_t LINE = 64, ROW = 2048, PAGE_ROWS = 16, PAGE_LINES = PAGE_ROWS * ROW / LINE;

// ROWS rows are read CHUNK bytes at a time, row after row. Lines are fetched AHEAD rows before, in the order
// of memory, 3 * HELD cycles or more apart. Sums are many, so that no product waits for another.
template <int PRODUCTS, int ROWS, int CHUNK, int AHEAD, int HELD>
static void read(const char* const* pages, int64_t num_pages, float* total) {
    __m512 sums[16];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    const __m512bh one = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    int64_t fetched = AHEAD * ROW / LINE, after = 0;
    for (int64_t p = 0; p < num_pages; ++p)
        for (int row = 0; row < PAGE_ROWS; row += ROWS)
            for (int at = 0; at < ROW; at += CHUNK, fetched += ROWS * CHUNK / LINE) {
                const char* next = pages[std::min(fetched / PAGE_LINES, num_pages - 1)] + fetched % PAGE_LINES * LINE;
                const char* from = pages[p] + row * ROW + at;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                    for (int b = 0; b < CHUNK; b += LINE) {
                        const int number = r * (CHUNK / LINE) + b / LINE;
                        for (int h = 0; h < HELD; ++h) asm volatile("imul $1, %0, %0" : "+r"(after) : : "cc");
                        if (AHEAD) _mm_prefetch(next + number * LINE + after, _MM_HINT_T1);
                        const __m512bh line = (__m512bh)_mm512_loadu_si512(from + r * ROW + b);
                        for (int i = 0; i < PRODUCTS; ++i) {
                            __m512& sum = sums[(number * PRODUCTS + i) % 16];
                            sum = _mm512_dpbf16_ps(sum, line, one);
                        }
                    }
            }
    for (auto& sum : sums) *total += _mm512_reduce_add_ps(sum);
}

extern "C" void read_pages(const char* const* pages, int64_t num_pages, int products, int rows, int chunk, int ahead, int held, float* total) {
#define CASE(R, C, A, H) \
    if (rows == R && chunk == C && ahead == A && held == H) return products == 4 ? read<4, R, C, A, H>(pages, num_pages, total) : read<8, R, C, A, H>(pages, num_pages, total);
    CASE(1, 256, 0, 0) CASE(1, 256, 16, 0) CASE(1, 256, 16, 2) CASE(8, 256, 16, 0) CASE(8, 256, 16, 2) CASE(16, 64, 32, 0) CASE(16, 64, 32, 2)
}
