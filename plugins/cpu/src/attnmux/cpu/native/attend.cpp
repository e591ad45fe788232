// Attention over a KV cache of plain rows, for CPUs. No headers of torch or Python are needed.
//
// A work item is a block of queries of one request, one KV head, and a range of keys. Its rows are
// the queries of all query heads that share the KV head. Keys are widened to float32 block by block;
// products are kept in registers by GCC's vector types, whose width the compiler's target decides.
// Ranges of keys of the same queries are merged by their logarithms of sums in a second pass.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint16_t half_words __attribute__((vector_size(2 * W), aligned(2), may_alias));

constexpr int KEYS = 32;            // of a block
constexpr int ROWS = 64;            // of an item, unless one query has more heads
constexpr float NONE = -std::numeric_limits<float>::infinity();

enum Type : int32_t { F32, BF16, F16, E4M3, E5M2 };

static inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
static inline vec all(float x) { return vec{} + x; }

static float half_to_float(uint16_t h) {
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

static float byte_to_float(uint8_t b, Type type) {
    if (type == E5M2) return half_to_float(uint16_t(b) << 8);
    if ((b & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
    const int exponent = (b >> 3) & 15, mantissa = b & 7;
    const float value = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    return b & 128 ? -value : value;
}

// The values of 8-bit floats, made once.
struct Bytes {
    float of[2][256];
    Bytes() {
        for (int b = 0; b < 256; ++b) {
            of[0][b] = byte_to_float(uint8_t(b), E4M3);
            of[1][b] = byte_to_float(uint8_t(b), E5M2);
        }
    }
};

static void widen(const void* source, Type type, float* out, int n, const Bytes& bytes) {
    int i = 0;
    if (type == F32) {
        std::memcpy(out, source, size_t(n) * 4);
    } else if (type == BF16) {
        const uint16_t* p = static_cast<const uint16_t*>(source);
        for (; i + W <= n; i += W) {
            const ivec wide = __builtin_convertvector(*reinterpret_cast<const half_words*>(p + i), ivec) << 16;
            store(out + i, (vec)wide);
        }
        for (; i < n; ++i) {
            const uint32_t bits = uint32_t(p[i]) << 16;
            std::memcpy(out + i, &bits, 4);
        }
    } else if (type == F16) {
        const uint16_t* p = static_cast<const uint16_t*>(source);
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
        for (; i < n; ++i) out[i] = half_to_float(p[i]);
    } else {
        const uint8_t* p = static_cast<const uint8_t*>(source);
        const float* table = bytes.of[type == E5M2];
        for (; i < n; ++i) out[i] = table[p[i]];
    }
}

static uint16_t to_bfloat(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_half(float x) {
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

static void narrow(const float* from, void* out, Type type, int n) {
    if (type == F32) std::memcpy(out, from, size_t(n) * 4);
    else if (type == BF16) for (int i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = to_bfloat(from[i]);
    else for (int i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = to_half(from[i]);
}

// e^x within 2 units in the last place for x <= 0, and 0 below -87.3. Cephes' polynomial.
static inline vec exponential(vec x) {
    const vec low = all(-87.3f);
    const ivec dead = x < low;
    x = dead ? low : x;
    const vec shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits
    const vec whole = shifted - 12582912.0f;
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec y = all(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    const ivec power = ((ivec)shifted + 127) << 23;
    y = y * (vec)power;
    return dead ? all(0.0f) : y;
}

static inline float total(vec v) {
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += v[i];
    return sum;
}

typedef float vec4 __attribute__((vector_size(16)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float loose4 __attribute__((vector_size(16), aligned(4), may_alias));

// The totals of four vectors, in order.
static inline vec4 totals(vec4 a, vec4 b, vec4 c, vec4 d) {
    const vec4 ab = __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
    const vec4 cd = __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

#if defined(__AVX2__)
static inline vec4 totals(vec8 a, vec8 b, vec8 c, vec8 d) {
    const vec8 ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    const vec8 cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    const vec8 sums = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}
#endif
#if defined(__AVX512F__)
static inline vec8 halved(vec v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vec4 totals(vec a, vec b, vec c, vec d) { return totals(halved(a), halved(b), halved(c), halved(d)); }
#endif

// scores[r][j] = q[r] . k[j] for R rows and 4 keys. D is a multiple of W.
template <int R>
static inline void dot(const float* q, int q_stride, const float* k, int k_stride, int D, float* scores) {
    vec sums[R][4] = {};
    for (int d = 0; d < D; d += W) {
        vec keys[4];
        for (int j = 0; j < 4; ++j) keys[j] = load(k + j * k_stride + d);
        for (int r = 0; r < R; ++r) {
            const vec query = load(q + r * q_stride + d);
            for (int j = 0; j < 4; ++j) sums[r][j] += query * keys[j];
        }
    }
    for (int r = 0; r < R; ++r)
        *reinterpret_cast<loose4*>(scores + r * KEYS) = totals(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

// out[r] += weights[r] . v for R rows and C vectors of columns.
template <int R, int C>
static inline void mix(const float* weights, const float* v, int v_stride, int num_keys, float* out, int out_stride) {
    vec sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * out_stride + c * W);
    for (int j = 0; j < num_keys; ++j) {
        vec values[C];
        for (int c = 0; c < C; ++c) values[c] = load(v + j * v_stride + c * W);
        for (int r = 0; r < R; ++r) {
            const vec weight = all(weights[r * KEYS + j]);
            for (int c = 0; c < C; ++c) sums[r][c] += weight * values[c];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(out + r * out_stride + c * W, sums[r][c]);
}

extern "C" {

// Strides are in elements. T' is qo_indptr[B]; rows of q after it belong to no request.
struct Call {
    const void *q, *q_rope, *k, *v;  // v null: the front of k
    void* out;
    float* lse;           // null: not wanted
    const float* sinks;   // null: none
    const int32_t *qo_indptr, *span_indptr, *span_start;  // spans: keys that a request's queries see
    const int32_t* slots;                                 // of all spans, one request after another
    const int64_t *first, *end;                           // [T'] each query's range of keys
    const int64_t *hidden_from, *hidden_to;               // [T'] null: none; keys hidden in it
    const uint8_t* mask;                                  // null: none
    const int64_t *mask_row, *mask_start;                 // [T'] place of key 0 in it, first key of it
    int64_t q_token, q_head, rope_token, rope_head, k_slot, k_head, v_slot, v_head, out_token, out_head, lse_token, lse_head;
    int32_t num_requests, num_tokens, num_heads, num_kv_heads, D, rope, Dv;
    int32_t q_type, kv_type;
    float scaling, cap, v_scale;
    int32_t split;        // keys of an item; 0: decided by the threads
    int32_t num_threads;
};

typedef void (*Body)(int64_t, int64_t, void*);
typedef int32_t (*ParallelFor)(int64_t, int64_t, int64_t, Body, void*);
}

struct Item {
    int32_t request, begin, end, head;  // tokens, counted from the request's first new one
    int32_t key, key_end;               // the range of keys
    int64_t partial;      // place of its rows among the partial results; -1: the only item of its rows
};
struct Tile {
    int32_t request, begin, end, head;
    int64_t partial;
    int32_t parts;
};

struct Step {
    const Call& call;
    const Bytes& bytes;
    std::vector<Item> items;
    std::vector<Tile> split_tiles;
    std::vector<float> partials;  // [rows][Dv + 2]: sums, then the largest logit and the sum of weights
    std::atomic<int64_t> next{0};
    int group, D, Dv, width, out_width;
    Step(const Call& c, const Bytes& b) : call(c), bytes(b) {
        group = c.num_heads / c.num_kv_heads;
        D = c.D + c.rope;
        Dv = c.Dv;
        width = (D + W - 1) / W * W;
        out_width = (Dv + W - 1) / W * W;
    }
};

static void plan(Step& step) {
    const Call& c = step.call;
    const int tokens = std::max(1, ROWS / step.group);
    int64_t work = 0;
    for (int b = 0; b < c.num_requests; ++b)
        work += int64_t(c.qo_indptr[b + 1] - c.qo_indptr[b]) * (c.span_indptr[b + 1] - c.span_indptr[b]) * step.group;
    work *= c.num_kv_heads;
    int64_t rows = 0;
    for (int b = 0; b < c.num_requests; ++b) {
        const int num = c.qo_indptr[b + 1] - c.qo_indptr[b];
        for (int begin = 0; begin < num; begin += tokens) {
            const int end = std::min(begin + tokens, num), height = (end - begin) * step.group;
            int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
            for (int t = c.qo_indptr[b] + begin; t < c.qo_indptr[b] + end; ++t) {
                low = std::min(low, c.first[t]);
                high = std::max(high, c.end[t]);
            }
            low = std::max<int64_t>(low, 0);
            // Cuts are at multiples of the split, wherever the first visible key is
            int64_t split = c.split;
            if (!split) {
                split = work / (4 * int64_t(c.num_threads) * height) + 1;
                split = std::max<int64_t>((split + KEYS - 1) / KEYS * KEYS, 8 * KEYS);
            }
            const int64_t from = low / split, to = high > low ? (high + split - 1) / split : from + 1;
            const int parts = int(to - from);
            for (int h = 0; h < c.num_kv_heads; ++h) {
                if (parts > 1) step.split_tiles.push_back({b, begin, end, h, rows, parts});
                for (int64_t part = from; part < to; ++part) {
                    const int64_t key = std::max(low, part * split), stop = std::min(high, (part + 1) * split);
                    step.items.push_back({b, begin, end, h, int32_t(key), int32_t(std::max(key, stop)), parts > 1 ? rows : -1});
                    if (parts > 1) rows += height;
                }
            }
        }
    }
    step.partials.resize(size_t(rows) * (step.Dv + 2));
}

struct Scratch {
    std::vector<float> q, k, v, out, scores, top, sum;
};

// One row's result. top, sum: of its logits; NONE and 0 where it sees no key.
static void write(const Step& step, int token, int head, const float* out, float top, float sum) {
    const Call& c = step.call;
    float kept = 1.0f;
    if (c.sinks) {
        const float sink = c.sinks[head], higher = std::max(top, sink);
        kept = top == NONE ? 0.0f : std::exp(top - higher);
        sum = sum * kept + std::exp(sink - higher);
        top = higher;
    }
    const float factor = sum == 0 ? 0.0f : kept / sum * c.v_scale;
    float row[step.Dv];
    for (int d = 0; d < step.Dv; ++d) row[d] = out[d] * factor;
    const int64_t size = c.q_type == F32 ? 4 : 2;
    narrow(row, static_cast<char*>(c.out) + (token * c.out_token + head * c.out_head) * size, Type(c.q_type), step.Dv);
    if (c.lse) c.lse[token * c.lse_token + head * c.lse_head] = sum == 0 ? NONE : top + std::log(sum);
}

static void run(Step& step, const Item& item, Scratch& s) {
    const Call& c = step.call;
    const int group = step.group, D = step.D, width = step.width, out_width = step.out_width;
    const int num_rows = (item.end - item.begin) * group, first_token = c.qo_indptr[item.request] + item.begin;
    const int padded = (num_rows + 3) / 4 * 4;
    const Type q_type = Type(c.q_type), kv_type = Type(c.kv_type);
    const int q_size = q_type == F32 ? 4 : 2, kv_size = kv_type == F32 ? 4 : kv_type < E4M3 ? 2 : 1;
    s.q.assign(size_t(padded) * width, 0.0f);
    s.k.assign(size_t(KEYS) * width, 0.0f);
    if (c.v) s.v.assign(size_t(KEYS) * out_width, 0.0f);
    s.out.assign(size_t(padded) * out_width, 0.0f);
    s.scores.assign(size_t(padded) * KEYS, 0.0f);
    s.top.assign(padded, NONE);
    s.sum.assign(padded, 0.0f);
    for (int r = 0; r < num_rows; ++r) {
        const int64_t token = first_token + r / group, head = item.head * group + r % group;
        float* row = s.q.data() + size_t(r) * width;
        widen(static_cast<const char*>(c.q) + (token * c.q_token + head * c.q_head) * q_size, q_type, row, c.D, step.bytes);
        if (c.rope)
            widen(static_cast<const char*>(c.q_rope) + (token * c.rope_token + head * c.rope_head) * q_size, q_type, row + c.D, c.rope, step.bytes);
        for (int d = 0; d < D; ++d) row[d] *= c.scaling;
    }
    const int32_t* slots = c.slots + c.span_indptr[item.request] - c.span_start[item.request];
    // Blocks begin at multiples of KEYS, so that a row's sums are added in the same order in any step
    for (int key = item.key / KEYS * KEYS; key < item.key_end; key += KEYS) {
        const int num = std::min(KEYS, item.key_end - key), skipped = std::max(item.key - key, 0);
        for (int j = skipped; j < num; ++j) {
            const int64_t slot = slots[key + j];
            if (key + j + 4 < item.key_end) {
                const int64_t ahead = slots[key + j + 4];
                const char* row = static_cast<const char*>(c.k) + (ahead * c.k_slot + item.head * c.k_head) * kv_size;
                for (int at = 0; at < D * kv_size; at += 64) __builtin_prefetch(row + at);
            }
            widen(static_cast<const char*>(c.k) + (slot * c.k_slot + item.head * c.k_head) * kv_size, kv_type, s.k.data() + size_t(j) * width, D, step.bytes);
            if (c.v) {
                const char* row = static_cast<const char*>(c.v) + (slot * c.v_slot + item.head * c.v_head) * kv_size;
                for (int at = 0; at < step.Dv * kv_size; at += 64) __builtin_prefetch(row + at);
            }
        }
        const int keys4 = (num + 3) / 4 * 4;
        for (int r = 0; r < padded; r += 4) {
            float* scores = s.scores.data() + size_t(r) * KEYS;
            for (int j = 0; j < keys4; j += 4) {
                const float* keys = s.k.data() + size_t(j) * width;
                const float* queries = s.q.data() + size_t(r) * width;
                if (W == 16) dot<4>(queries, width, keys, width, width, scores + j);
                else {
                    dot<2>(queries, width, keys, width, width, scores + j);
                    dot<2>(queries + 2 * width, width, keys, width, width, scores + j + 2 * KEYS);
                }
            }
        }
        if (c.v)
            for (int j = skipped; j < num; ++j)
                widen(static_cast<const char*>(c.v) + (slots[key + j] * c.v_slot + item.head * c.v_head) * kv_size, kv_type, s.v.data() + size_t(j) * out_width, step.Dv, step.bytes);
        for (int r = 0; r < num_rows; ++r) {
            float* scores = s.scores.data() + size_t(r) * KEYS;
            const int token = first_token + r / group;
            if (c.cap > 0) for (int j = 0; j < num; ++j) scores[j] = c.cap * std::tanh(scores[j] / c.cap);
            const int64_t low = c.first[token] - key, high = c.end[token] - key;
            for (int64_t j = 0; j < std::min<int64_t>(low, num); ++j) scores[j] = NONE;
            for (int64_t j = std::max<int64_t>(high, 0); j < num; ++j) scores[j] = NONE;
            if (c.hidden_from)
                for (int64_t j = std::max<int64_t>(c.hidden_from[token] - key, 0); j < std::min<int64_t>(c.hidden_to[token] - key, num); ++j) scores[j] = NONE;
            if (c.mask) {
                const uint8_t* keep = c.mask + c.mask_row[token] + key;
                const int64_t masked = std::max(low, c.mask_start[token] - key);
                for (int64_t j = std::max<int64_t>(masked, 0); j < std::min<int64_t>(high, num); ++j)
                    if (!keep[j]) scores[j] = NONE;
            }
            for (int j = num; j < KEYS; ++j) scores[j] = NONE;
            vec highest = load(scores);
            for (int j = W; j < KEYS; j += W) {
                const vec one = load(scores + j);
                highest = one > highest || one != one ? one : highest;
            }
            float top = s.top[r];
            for (int i = 0; i < W; ++i) top = highest[i] > top || highest[i] != highest[i] ? highest[i] : top;
            if (top == NONE) {
                for (int j = 0; j < KEYS; ++j) scores[j] = 0.0f;
                continue;
            }
            if (top != s.top[r]) {
                const float decay = std::exp(s.top[r] - top);
                s.sum[r] *= decay;
                float* out = s.out.data() + size_t(r) * out_width;
                for (int d = 0; d < out_width; d += W) store(out + d, load(out + d) * decay);
                s.top[r] = top;
            }
            vec sums = {};
            for (int j = 0; j < KEYS; j += W) {
                const vec weights = exponential(load(scores + j) - top);
                store(scores + j, weights);
                sums += weights;
            }
            s.sum[r] += total(sums);
        }
        const float* values = c.v ? s.v.data() : s.k.data();
        const int stride = c.v ? out_width : width;
        for (int r = 0; r < padded; r += 4) {
            const float* weights = s.scores.data() + size_t(r) * KEYS;
            float* out = s.out.data() + size_t(r) * out_width;
            int d = 0;
            for (; d + 2 * W <= out_width; d += 2 * W) mix<4, 2>(weights, values + d, stride, num, out + d, out_width);
            for (; d < out_width; d += W) mix<4, 1>(weights, values + d, stride, num, out + d, out_width);
        }
    }
    for (int r = 0; r < num_rows; ++r) {
        const float* out = s.out.data() + size_t(r) * out_width;
        if (item.partial < 0) {
            write(step, first_token + r / group, item.head * group + r % group, out, s.top[r], s.sum[r]);
            continue;
        }
        float* row = step.partials.data() + size_t(item.partial + r) * (step.Dv + 2);
        std::memcpy(row, out, size_t(step.Dv) * 4);
        row[step.Dv] = s.top[r];
        row[step.Dv + 1] = s.sum[r];
    }
}

static void merge(const Step& step, const Tile& tile, Scratch& s) {
    const Call& c = step.call;
    const int height = (tile.end - tile.begin) * step.group, stride = step.Dv + 2;
    s.out.resize(step.Dv);
    for (int r = 0; r < height; ++r) {
        const float* rows = step.partials.data() + size_t(tile.partial + r) * stride;
        float top = NONE, sum = 0;
        for (int part = 0; part < tile.parts; ++part) {
            const float one = rows[size_t(part) * height * stride + step.Dv];
            top = one > top || one != one ? one : top;
        }
        std::fill(s.out.begin(), s.out.end(), 0.0f);
        for (int part = 0; part < tile.parts; ++part) {
            const float* row = rows + size_t(part) * height * stride;
            if (row[step.Dv] == NONE) continue;
            const float factor = std::exp(row[step.Dv] - top);
            sum += row[step.Dv + 1] * factor;
            for (int d = 0; d < step.Dv; ++d) s.out[d] += row[d] * factor;
        }
        const int token = c.qo_indptr[tile.request] + tile.begin + r / step.group;
        write(step, token, tile.head * step.group + r % step.group, s.out.data(), top, sum);
    }
}

static void run_items(int64_t, int64_t, void* context) {
    Step& step = *static_cast<Step*>(context);
    Scratch scratch;
    for (int64_t at; (at = step.next.fetch_add(1)) < int64_t(step.items.size());) run(step, step.items[at], scratch);
}

static void merge_tiles(int64_t begin, int64_t end, void* context) {
    const Step& step = *static_cast<Step*>(context);
    Scratch scratch;
    for (int64_t at = begin; at < end; ++at) merge(step, step.split_tiles[at], scratch);
}

// Returns 0; 1 where memory is short. `parallel_for` is torch's, which runs on torch's threads.
extern "C" int attend(const Call* call, ParallelFor parallel_for) {
    static const Bytes bytes;
    try {
        Step step(*call, bytes);
        plan(step);
        parallel_for(0, call->num_threads, 1, run_items, &step);
        if (!step.split_tiles.empty()) parallel_for(0, int64_t(step.split_tiles.size()), 1, merge_tiles, &step);
        const std::vector<float> none(step.Dv, 0.0f);
        for (int t = call->qo_indptr[call->num_requests]; t < call->num_tokens; ++t)
            for (int h = 0; h < call->num_heads; ++h) write(step, t, h, none.data(), NONE, 0.0f);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
