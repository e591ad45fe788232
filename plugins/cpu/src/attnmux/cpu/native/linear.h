// out = x . weight^T + bias, for what a CPU's library multiplies slowly: few rows, and narrow values.
// Weights are widened to float32 where they are read.
//
// A few rows of x read the weights once, as few queries read keys. More are a matrix product in
// registers, over a block of weights that was widened once for many rows.
#pragma once

#include "panels.h"
#include "stream.h"

extern "C" {

// Row-major and of one type. Strides are in elements.
struct Linear {
    const void *x, *weight, *bias;  // [num_rows][width], [num_out][width], [num_out] or null
    void* out;                      // [num_rows][num_out]
    int64_t x_row, weight_row, out_row;
    int64_t num_rows, width, num_out;  // width: a multiple of 2 W
    int32_t type, num_threads;
};
}

constexpr int FEW_ROWS = W == 16 ? 32 : 8;  // of x, which read the weights as they lie
constexpr int STREAM_OUT = 4 * DOT_KEYS;  // weights' rows of an item
constexpr int NARROW = 2048;           // width up to which one row reads one of the weights at a time
constexpr int PRODUCT_OUT = 8 * STRIP;
constexpr int PRODUCT_ROWS = 16 * PANEL;  // of x
constexpr int DEPTH = 256;              // columns that are widened at a time

// Row r of the result from its n-th value on. values: `step` floats from one to the next.
template <Type T> static inline void write_products(const Linear& call, int64_t r, int64_t n, const float* values, int64_t step, int num) {
    float sums[PRODUCT_OUT];
    for (int i = 0; i < num; ++i) sums[i] = values[i * step];
    if (call.bias) {
        float bias[round_up(PRODUCT_OUT, BLOCK)];
        widen_query(static_cast<const char*>(call.bias) + n * size_of(T), T, num, bias);
        for (int i = 0; i < num; ++i) sums[i] += bias[i];
    }
    narrow(sums, static_cast<char*>(call.out) + (r * call.out_row + n) * size_of(T), T, num);
}

template <Type T> struct Product {
    const Linear& call;
    const int width = int(call.width);
    Aligned<float> x;  // few rows: [num_rows][width]; else panels [width][PANEL]
    std::atomic<int64_t> next{0};

    const char* row(const void* of, int64_t stride, int64_t r) const { return static_cast<const char*>(of) + r * stride * size_of(T); }
    bool is_few() const { return call.num_rows <= FEW_ROWS; }
    int64_t blocks_of_rows() const { return is_few() ? 1 : (call.num_rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS; }
    int64_t num_items() const {
        const int size = is_few() ? STREAM_OUT : PRODUCT_OUT;
        return (call.num_out + size - 1) / size * blocks_of_rows();
    }
    void write(int64_t r, int64_t n, const float* values, int64_t step, int num) const { write_products<T>(call, r, n, values, step, num); }
    void few(int64_t item) const {
        const int64_t n = item * STREAM_OUT;
        const int num = int(std::min<int64_t>(STREAM_OUT, call.num_out - n)), num_rows = int(call.num_rows);
        const char* rows[STREAM_OUT + DOT_KEYS];
        for (int j = 0; j < STREAM_OUT + DOT_KEYS; ++j) rows[j] = row(call.weight, call.weight_row, std::min(n + j, call.num_out - 1));
        alignas(64) float sums[STREAM_OUT * FEW_ROWS];
        const auto query = [&](int r) { return reinterpret_cast<const char*>(x.data() + int64_t(r) * width); };
        const auto some = [&](auto R, int r) {
            for (int j = 0; j < num; j += DOT_KEYS)
                dots<T, decltype(R)::value>(query(r), int64_t(width) * 4, rows + j, r ? Next() : Next{rows[j + DOT_KEYS]}, 0, width, DOT_KEYS, sums + j * FEW_ROWS + r, FEW_ROWS);
        };
        int r = 0;
        for (; r + 4 <= num_rows; r += 4) some(std::integral_constant<int, 4>(), r);
        if (num_rows - r == 3) some(std::integral_constant<int, 3>(), r);
        if (num_rows - r == 2) some(std::integral_constant<int, 2>(), r);
        if (num_rows - r == 1 && (num_rows > 1 || width > NARROW)) some(std::integral_constant<int, 1>(), r);
        else if (num_rows == 1)
            for (int j = 0; j < num; ++j) dot<T, 1, 1>(query(0), 0, rows + j, Next{rows[j + DOT_KEYS / 2]}, 0, width, sums + j * FEW_ROWS, FEW_ROWS);
        for (int r = 0; r < num_rows; ++r) write(r, n, sums + r, FEW_ROWS, num);
    }
    void pack(int64_t panel) {
        float* out = x.data() + panel * width * PANEL;
        Aligned<float> wide(width);
        for (int i = 0; i < PANEL; ++i) {
            const int64_t r = panel * PANEL + i;
            if (r < call.num_rows) widen<T>(row(call.x, call.x_row, r), width, width, wide.data());
            else std::fill(wide.begin(), wide.end(), 0.0f);
            for (int d = 0; d < width; ++d) out[d * PANEL + i] = wide[d];
        }
    }
    // Fetches what is widened next, as much as there are panels to share that work.
    void fetch_columns(int64_t n, int d, int from, int to) const {
        for (int j = from; j < to; ++j) {
            const char* columns = row(call.weight, call.weight_row, std::min(n + j, call.num_out - 1));
            for (int at = d; at < std::min(d + DEPTH, width); at += 64 / size_of(T)) prefetch(columns + int64_t(at) * size_of(T));
        }
    }
    void many(int64_t item, Scratch& s) const {
        const int64_t n = item / blocks_of_rows() * PRODUCT_OUT, first = item % blocks_of_rows() * PRODUCT_ROWS;
        const int num = int(std::min<int64_t>(PRODUCT_OUT, call.num_out - n)), num_rows = int(std::min<int64_t>(PRODUCT_ROWS, call.num_rows - first));
        const int padded = round_up(num_rows, PANEL);
        s.out.assign(size_t(PRODUCT_OUT) * padded, 0.0f);
        s.k.resize(size_t(PRODUCT_OUT) * DEPTH);
        for (int d = 0; d < width; d += DEPTH) {
            const int depth = std::min(DEPTH, width - d);
            for (int j = 0; j < PRODUCT_OUT; ++j) widen<T>(row(call.weight, call.weight_row, std::min(n + j, call.num_out - 1)) + int64_t(d) * size_of(T), depth, depth, s.k.data() + j * DEPTH);
            for (int r = 0; r < padded; r += PANEL) {
                if (d + DEPTH < width) fetch_columns(n, d + DEPTH, PRODUCT_OUT * r / padded, PRODUCT_OUT * (r + PANEL) / padded);
                const float* panel = x.data() + (first + r) * width + int64_t(d) * PANEL;
                for (int j = 0; j < num; j += STRIP) {
                    vec sums[STRIP][2];
                    float* out = s.out.data() + int64_t(j) * padded + r;
                    for (int i = 0; i < STRIP; ++i)
                        for (int half = 0; half < 2; ++half) sums[i][half] = load(out + i * padded + half * W);
                    product(s.k.data() + j * DEPTH, DEPTH, 1, panel, PANEL, depth, sums);
                    for (int i = 0; i < STRIP; ++i)
                        for (int half = 0; half < 2; ++half) store(out + i * padded + half * W, sums[i][half]);
                }
            }
        }
        for (int r = 0; r < num_rows; ++r) write(first + r, n, s.out.data() + r, padded, num);
    }
    static void work(int64_t, int64_t, void* context) {
        Product& product = *static_cast<Product*>(context);
        Scratch scratch;
        for (int64_t at; (at = product.next.fetch_add(1)) < product.num_items();) {
            if (product.is_few()) product.few(at);
            else product.many(at, scratch);
        }
    }
    static void pack_all(int64_t begin, int64_t end, void* context) {
        for (int64_t at = begin; at < end; ++at) static_cast<Product*>(context)->pack(at);
    }
    void run(ParallelFor parallel_for) {
        const int64_t num_panels = (call.num_rows + PANEL - 1) / PANEL;
        x.resize(size_t(is_few() ? call.num_rows : num_panels * PANEL) * width);
        if (is_few())
            for (int64_t r = 0; r < call.num_rows; ++r) widen<T>(row(call.x, call.x_row, r), width, width, x.data() + r * width);
        else parallel_for(0, num_panels, 1, pack_all, this);
        parallel_for(0, std::min<int64_t>(call.num_threads, num_items()), 1, work, this);
    }
};
