// One call: what it is given, and how its work is cut into items.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "values.h"

extern "C" {

// A step's keys. T' is qo_indptr[B]; rows of q after it belong to no request.
struct Keys {
    const int32_t *qo_indptr, *span_indptr, *span_start;  // spans: keys that a request's queries see
    const int32_t* slots;                                 // of all spans, one request after another
    const int64_t *first, *end;                           // [T'] each query's range of keys
    const int64_t *hidden_from, *hidden_to;               // [T'] null: none; keys hidden in it
    const uint8_t* mask;                                  // null: none
    const int64_t *mask_row, *mask_start;                 // [T'] place of key 0 in it, first key of it
    int64_t num_requests;
};

// Strides are in elements.
struct Call : Keys {
    const void *q, *q_rope, *k, *v;  // v null: the front of k
    void* out;
    float* lse;           // null: not wanted
    const float* sinks;   // null: none
    int64_t q_token, q_head, rope_token, rope_head, k_slot, k_head, v_slot, v_head, out_token, out_head, lse_token, lse_head;
    int32_t num_tokens, num_heads, num_kv_heads, D, rope, Dv;
    int32_t q_type, kv_type;
    float scaling, cap, v_scale;
    int32_t split;        // keys of an item; 0: decided by the threads
    int32_t num_threads;
};

typedef void (*Body)(int64_t, int64_t, void*);
typedef int32_t (*ParallelFor)(int64_t, int64_t, int64_t, Body, void*);
}

// STREAM: few queries; rows of K and V are widened in registers and meet all their queries there.
// FEW, FEW_TILES: as STREAM, in bfloat16, by AVX-512-BF16 or on the CPU's matrix unit.
// PANELS: many queries; rows are widened into a buffer and multiplied as matrices, in float32.
// PAIRS, TILES: as PANELS, in bfloat16, by AVX-512-BF16 or on the CPU's matrix unit.
enum class Kernel { STREAM, FEW, FEW_TILES, PANELS, PAIRS, TILES };

constexpr int FEW = 16;           // rows of a KV head from which on they are a matrix
constexpr int LEAST_TILE_ROWS = 3;  // rows of a KV head from which on FEW_TILES is faster than FEW
constexpr int PANEL_ROWS = 96;    // of an item, unless one query has more heads
constexpr int PAIR_ROWS = 192;
constexpr int TILE_ROWS = 256;
constexpr int CUT = 64;           // ranges of keys are cut at multiples of it

// A block of queries of one request with a range of KV heads and a range of keys. The rows of a KV
// head are the queries of all query heads that share it, and lie head after head.
struct Item {
    Kernel kernel;
    int32_t request, begin, end;  // tokens, counted from the request's first new one
    int32_t head, head_end;       // KV heads
    int32_t key, key_end;
    int64_t partial;              // place of its rows among the partial results; -1: the only item of its rows
};

// Rows of one KV head whose keys several items share.
struct Split {
    int32_t request, begin, end, head;
    int64_t partial, stride;      // its first row, and how far on the next item's is
    int32_t parts;
};

struct Step {
    const Call& call;
    std::vector<Item> items;
    std::vector<Split> splits;
    std::unique_ptr<float[]> partials;  // [rows][Dv + 2]: sums, then the largest logit and the sum of weights
    std::atomic<int64_t> next{0};
    Type q_type, kv_type;
    int group, D, Dv, width, out_width;
    float scaling;  // of products: `capped` divides by ln 2 too
    Kernel few, fewest;  // the kernels for few queries, and for fewer than LEAST_TILE_ROWS
    Kernel many;    // and for many
    int many_rows;  // rows of its items

    Step(const Call& c, bool tiles) : call(c), q_type(Type(c.q_type)), kv_type(Type(c.kv_type)) {
        group = c.num_heads / c.num_kv_heads;
        D = c.D + c.rope;
        Dv = c.Dv;
        width = round_up(D, BLOCK);
        out_width = round_up(Dv, BLOCK);
        scaling = c.cap > 0 ? c.scaling : c.scaling * LOG2_E;
        const bool narrow = q_type == BF16 && kv_type != F32 && kv_type != F16;
        fewest = narrow && HAS_PAIRS ? Kernel::FEW : Kernel::STREAM;
        few = narrow && tiles && kv_type == BF16 ? Kernel::FEW_TILES : fewest;
        many = narrow && tiles ? Kernel::TILES : narrow && HAS_PAIRS ? Kernel::PAIRS : Kernel::PANELS;
        many_rows = many == Kernel::TILES ? TILE_ROWS : many == Kernel::PAIRS ? PAIR_ROWS : PANEL_ROWS;
    }
    // Whether products are scaled when weights are computed, after their largest was found.
    bool scaled_later() const { return call.cap <= 0 && scaling > 0; }
    const char* key_row(int64_t slot, int head) const {
        return static_cast<const char*>(call.k) + (slot * call.k_slot + head * call.k_head) * size_of(kv_type);
    }
    const char* value_row(int64_t slot, int head) const {
        if (!call.v) return key_row(slot, head);
        return static_cast<const char*>(call.v) + (slot * call.v_slot + head * call.v_head) * size_of(kv_type);
    }
    // By the position of a key in its request.
    const int32_t* slots(const Item& item) const {
        return call.slots + call.span_indptr[item.request] - call.span_start[item.request];
    }
    // The next item that a thread takes; null: none.
    const Item* coming() const {
        const int64_t at = next.load(std::memory_order_relaxed);
        return at < int64_t(items.size()) ? &items[at] : nullptr;
    }
    int first_token(const Item& item) const { return call.qo_indptr[item.request] + item.begin; }
    int height(const Item& item) const { return (item.end - item.begin) * group; }
    // Where the r-th row of a KV head of an item has its query, and the rotary part of it.
    const char* query_row(const Item& item, int head, int r) const {
        const int64_t token = first_token(item) + r / group, q_head = head * group + r % group;
        return static_cast<const char*>(call.q) + (token * call.q_token + q_head * call.q_head) * size_of(q_type);
    }
    const char* rope_row(const Item& item, int head, int r) const {
        const int64_t token = first_token(item) + r / group, q_head = head * group + r % group;
        return static_cast<const char*>(call.q_rope) + (token * call.rope_token + q_head * call.rope_head) * size_of(q_type);
    }
    char* result_row(int64_t token, int64_t head) const {
        return static_cast<char*>(call.out) + (token * call.out_token + head * call.out_head) * size_of(q_type);
    }
    // Fetches where the result of a row is written soon.
    void fetch_result(const Item& item, int head, int r) const {
        const char* to = result_row(first_token(item) + r / group, head * group + r % group);
        for (int at = 0; at < Dv * size_of(q_type); at += 64) prefetch(to + at);
    }
    // The query, unscaled, in `width` values.
    void query(const Item& item, int head, int r, float* out) const {
        widen_query(query_row(item, head, r), q_type, call.D, out);
        if (call.rope) widen_query(rope_row(item, head, r), q_type, call.rope, out + call.D);
        std::fill(out + D, out + width, 0.0f);
    }
    // The D values of a query in bfloat16.
    void narrow_query(const Item& item, int head, int r, char* out) const {
        std::memcpy(out, query_row(item, head, r), size_t(call.D) * 2);
        if (call.rope) std::memcpy(out + call.D * 2, rope_row(item, head, r), size_t(call.rope) * 2);
    }
};

// Memory that begins at a cache line, so that no vector lies in two.
template <typename V> struct LineAllocator {
    typedef V value_type;
    LineAllocator() = default;
    template <typename U> LineAllocator(const LineAllocator<U>&) {}
    V* allocate(size_t n) { return static_cast<V*>(::operator new(n * sizeof(V), std::align_val_t(64))); }
    void deallocate(V* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    template <typename U> bool operator==(const LineAllocator<U>&) const { return true; }
    template <typename U> bool operator!=(const LineAllocator<U>&) const { return false; }
};
template <typename V> using Aligned = std::vector<V, LineAllocator<V>>;

struct Scratch {
    Aligned<float> q, k, v, out, scores, top, sum, row, decay;
    Aligned<char> narrow_q, narrow_k, narrow_v, weights;
    Aligned<int32_t> first, end, hidden_from, hidden_to, pairs;
};

// The result of a query and head. top, sum: of its logits; NONE and 0 where it sees no key.
static inline void write(const Step& step, int token, int head, const float* out, float top, float sum) {
    const Call& c = step.call;
    float kept = 1.0f;
    if (c.sinks) {
        const float sink = c.sinks[head], most = std::max(top, sink);
        kept = top == NONE ? 0.0f : std::exp(top - most);
        sum = sum * kept + std::exp(sink - most);
        top = most;
    }
    const float factor = sum == 0 ? 0.0f : kept / sum * c.v_scale;
    float row[step.Dv];
    for (int d = 0; d < step.Dv; ++d) row[d] = out[d] * factor;
    narrow(row, step.result_row(token, head), step.q_type, step.Dv);
    if (c.lse) c.lse[token * c.lse_token + head * c.lse_head] = sum == 0 ? NONE : top + std::log(sum);
}

// Row r of the head-th KV head of an item. out: in the order of the values. top: divided by ln 2.
static inline void finish(Step& step, const Item& item, int head, int r, const float* out, float top, float sum) {
    top *= LN_2;
    if (item.partial < 0) {
        write(step, step.first_token(item) + r / step.group, head * step.group + r % step.group, out, top, sum);
        return;
    }
    const int64_t place = item.partial + int64_t(head - item.head) * step.height(item) + r;
    float* row = step.partials.get() + place * (step.Dv + 2);
    std::memcpy(row, out, size_t(step.Dv) * 4);
    row[step.Dv] = top;
    row[step.Dv + 1] = sum;
}

// Adds the items that share the work of one split up.
static inline void merge(const Step& step, const Split& split) {
    const int height = (split.end - split.begin) * step.group;
    const int64_t width = step.Dv + 2;
    float out[step.Dv];
    for (int r = 0; r < height; ++r) {
        const float* rows = step.partials.get() + (split.partial + r) * width;
        float top = NONE, sum = 0;
        for (int part = 0; part < split.parts; ++part) {
            top = std::max(top, rows[part * split.stride * width + step.Dv]);
        }
        std::fill(out, out + step.Dv, 0.0f);
        for (int part = 0; part < split.parts; ++part) {
            const float* row = rows + part * split.stride * width;
            if (row[step.Dv + 1] == 0) continue;
            const float factor = std::exp(row[step.Dv] - top);
            sum += row[step.Dv + 1] * factor;
            for (int d = 0; d < step.Dv; ++d) out[d] += row[d] * factor;
        }
        const int token = step.call.qo_indptr[split.request] + split.begin + r / step.group;
        write(step, token, split.head * step.group + r % step.group, out, top, sum);
    }
}
