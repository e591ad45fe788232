// Linear layers in bfloat16, as products of pairs that are added in float32 (AVX-512-BF16).
//
// A few rows of x meet 4 rows of the weights at a time, and a result is a sum across lanes. More rows
// are packed as pairs of values, 16 rows beside each other, for which words of weights are broadcast.
#pragma once

#include "linear.h"
#include "pairs.h"

#if defined(__AVX512BF16__) && LANES == 16

constexpr int DOT_ROWS = 8;   // of x, which are multiplied without being packed
constexpr int PAIR_OUT = 32;  // weights' rows of an item

struct PairProduct {
    const Linear& call;
    const int width = int(call.width);
    Aligned<int32_t> x;  // packed: panels [width / 2][16]
    std::atomic<int64_t> next{0};

    const char* weight(int64_t n) const { return static_cast<const char*>(call.weight) + std::min(n, call.num_out - 1) * call.weight_row * 2; }
    const char* row(int64_t r) const { return static_cast<const char*>(call.x) + r * call.x_row * 2; }
    bool is_few() const { return call.num_rows <= DOT_ROWS; }
    int64_t num_items() const { return (call.num_out + PAIR_OUT - 1) / PAIR_OUT; }

    // sums[j * DOT_ROWS + i] of R rows, the r-th and those after it, and the weights n + j, of which there
    // are 4. Fetches as many bytes from `ahead`, unless it is null.
    template <int R> void dot(int64_t r, int64_t n, const char* ahead, float* sums) const {
        const char *rows[R], *weights[4];
        for (int i = 0; i < R; ++i) rows[i] = row(r + i);
        for (int j = 0; j < 4; ++j) weights[j] = weight(n + j);
        vec parts[4][4] = {};
        for (int at = 0; at < 2 * width; at += 64) {
            if (ahead)
                for (int j = 0; j < 4; ++j) prefetch(ahead + at * 4 + j * 64);
            ivec query[R];
#pragma GCC unroll 4
            for (int i = 0; i < R; ++i) query[i] = load_ints(rows[i] + at);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const ivec w = load_ints(weights[j] + at);
#pragma GCC unroll 4
                for (int i = 0; i < R; ++i) parts[j][i] = add_pairs(parts[j][i], query[i], w);
            }
        }
        const vec all_sums = totals16(&parts[0][0]);
        for (int j = 0; j < 4; ++j) std::memcpy(sums + j * DOT_ROWS, reinterpret_cast<const char*>(&all_sums) + 16 * j, 4 * R);
    }
    void few(int64_t item) const {
        alignas(64) float sums[PAIR_OUT * DOT_ROWS];
        const int64_t n = item * PAIR_OUT;
        const int num = int(std::min<int64_t>(PAIR_OUT, call.num_out - n)), num_rows = int(call.num_rows);
        for (int j = 0; j < num; j += 4) {
            // Weights in the order of memory, two times 4 rows on
            const char* ahead = n + j + 12 <= call.num_out && call.weight_row == width ? weight(n + j + 8) : nullptr;
            for (int r = 0; r < num_rows; r += 4, ahead = nullptr) {
                float* to = sums + j * DOT_ROWS + r;
                const int left = num_rows - r;
                if (left >= 4) dot<4>(r, n + j, ahead, to);
                else if (left == 3) dot<3>(r, n + j, ahead, to);
                else if (left == 2) dot<2>(r, n + j, ahead, to);
                else dot<1>(r, n + j, ahead, to);
            }
        }
        for (int r = 0; r < num_rows; ++r) write_products<BF16>(call, r, n, sums + r, DOT_ROWS, num);
    }
    void pack(int64_t panel) {
        int32_t* out = x.data() + panel * width / 2 * W;
        for (int d = 0; d < width; d += 2 * W) {
            ivec block[W];
            for (int i = 0; i < W; ++i) block[i] = panel * W + i < call.num_rows ? load_ints(row(panel * W + i) + 2 * d) : ivec{};
            turn(block);
            for (int i = 0; i < W; ++i) *reinterpret_cast<loose_ints*>(out + (d / 2 + i) * W) = block[i];
        }
    }
    void many(int64_t item) const {
        alignas(64) float sums[PAIR_OUT * AT_ONCE];
        const int64_t n = item * PAIR_OUT;
        const int num = int(std::min<int64_t>(PAIR_OUT, call.num_out - n)), num_rows = int(call.num_rows);
        const int32_t* weights[SUMMED];
        const char* ahead[SUMMED];
        for (int r = 0; r < num_rows; r += AT_ONCE) {
            const int32_t* panel = x.data() + int64_t(r) * width / 2;
            for (int j = 0; j < num; j += SUMMED) {
                for (int i = 0; i < SUMMED; ++i) weights[i] = reinterpret_cast<const int32_t*>(weight(n + j + i)), ahead[i] = weight(n + j + i + 2 * SUMMED);
                if (num_rows - r > W) pair_logits<BF16, true>(weights, panel, panel + int64_t(W) * width / 2, width / 2, 1.0f, sums + j * AT_ONCE, r ? nullptr : ahead, nullptr);
                else pair_logits<BF16, false>(weights, panel, nullptr, width / 2, 1.0f, sums + j * AT_ONCE, r ? nullptr : ahead, nullptr);
            }
            for (int i = 0; i < std::min(AT_ONCE, num_rows - r); ++i) write_products<BF16>(call, r + i, n, sums + i, AT_ONCE, num);
        }
    }
    static void work(int64_t, int64_t, void* context) {
        PairProduct& product = *static_cast<PairProduct*>(context);
        for (int64_t at; (at = product.next.fetch_add(1)) < product.num_items();) {
            if (product.is_few()) product.few(at);
            else product.many(at);
        }
    }
    static void pack_all(int64_t begin, int64_t end, void* context) {
        for (int64_t at = begin; at < end; ++at) static_cast<PairProduct*>(context)->pack(at);
    }
    void run(ParallelFor parallel_for) {
        if (!is_few()) {
            const int64_t num_panels = (call.num_rows + W - 1) / W;
            x.resize(size_t(num_panels) * width / 2 * W);
            parallel_for(0, num_panels, 1, pack_all, this);
        }
        parallel_for(0, std::min<int64_t>(call.num_threads, num_items()), 1, work, this);
    }
};
static inline void multiply_bfloats(const Linear& call, ParallelFor parallel_for) {
    // Fewer rows wait for memory, and are widened as fast.
    if (call.num_rows >= 4 && call.width % BLOCK == 0) PairProduct{call}.run(parallel_for);
    else Product<BF16>{call}.run(parallel_for);
}
#else
static inline void multiply_bfloats(const Linear& call, ParallelFor parallel_for) { Product<BF16>{call}.run(parallel_for); }
#endif

// Returns 0; 1 where memory is short.
extern "C" int linear(const Linear* call, ParallelFor parallel_for) {
    try {
        switch (call->type) {
        case BF16: multiply_bfloats(*call, parallel_for); break;
        case F16: Product<F16>{*call}.run(parallel_for); break;
        default: Product<F32>{*call}.run(parallel_for);
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
