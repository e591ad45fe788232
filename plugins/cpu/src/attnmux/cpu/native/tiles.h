// Many queries, in bfloat16 on Intel's matrix unit (AMX). Products are in float32.
//
// scores[key][row] = K . Q', so rows of K are read as they lie and Q is packed once; the weights are
// rounded to bfloat16 and turned round, 16 rows by 16 pairs of keys at a time, and V is packed in
// pairs of keys, once for all rows of the item. Its columns lie in the order of `first_pairs`.
#pragma once

#include "columns.h"

#if defined(__AMX_BF16__) && LANES == 16
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr bool HAS_TILES = true;
constexpr int TILE = 16;        // rows of a tile, and words of 32 bits in one
constexpr int TILE_KEYS = 64;   // of a block
constexpr int PAIRED = 2 * TILE;
constexpr float SLACK = 8;      // a row's results are scaled when a logit exceeds theirs by more

// Linux grants the unit's state to a process that asks for it.
static inline bool ask_for_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int ASK = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return false;
#endif
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know that tiles read memory.
static inline void settle() { asm volatile("" ::: "memory"); }

// scores[32][16 N] = 32 keys . 16 N queries
template <int N> static inline void tile_scores(const char* k, const char* q, int width, float* scores, int stride) {
    const int64_t row = int64_t(width) * 2, panel = row * TILE, out = int64_t(stride) * 4;
    _tile_zero(0);
    _tile_zero(2);
    if (N > 1) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (int d = 0; d < width; d += PAIRED) {
        _tile_loadd(4, k + 2 * d, row);
        _tile_loadd(5, k + TILE * row + 2 * d, row);
        _tile_loadd(6, q + d * PAIRED, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (N > 1) {
            _tile_loadd(7, q + panel + d * PAIRED, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, scores, out);
    _tile_stored(2, scores + TILE * int64_t(stride), out);
    if (N > 1) {
        _tile_stored(1, scores + TILE, out);
        _tile_stored(3, scores + TILE * int64_t(stride) + TILE, out);
    }
}

// out[16 N][32] += weights[16 N][keys] . v[keys][32]
template <int N> static inline void tile_mix(const char* weights, const char* v, int v_width, int num_halves, float* out, int out_width) {
    constexpr int64_t tile = 1024, panel = TILE_KEYS / PAIRED * tile;
    const int64_t out_row = int64_t(out_width) * 4, v_row = int64_t(v_width) * 4;
    float* below = out + TILE * int64_t(out_width);
    _tile_loadd(0, out, out_row);
    _tile_loadd(1, out + TILE, out_row);
    if (N > 1) {
        _tile_loadd(2, below, out_row);
        _tile_loadd(3, below + TILE, out_row);
    }
    for (int half = 0; half < num_halves; ++half) {
        _tile_loadd(4, weights + half * tile, 64);
        _tile_loadd(6, v + half * TILE * v_row, v_row);
        _tile_loadd(7, v + half * TILE * v_row + 64, v_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (N > 1) {
            _tile_loadd(5, weights + panel + half * tile, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_row);
    _tile_stored(1, out + TILE, out_row);
    if (N > 1) {
        _tile_stored(2, below, out_row);
        _tile_stored(3, below + TILE, out_row);
    }
}

template <Type T> struct Tiles {
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int height = step.height(item), padded = round_up(height, TILE);
    const int width = round_up(step.D, PAIRED), out_width = round_up(step.Dv, PAIRED);
    const int64_t k_row = int64_t(width) * 2, v_row = int64_t(out_width) * 2;

    void prepare() {
        s.narrow_k.assign(size_t(TILE_KEYS) * k_row, 0);
        s.narrow_v.assign(size_t(TILE_KEYS + 2) * v_row, 0);
        s.weights.resize(size_t(PAIRED) * TILE_KEYS * 2);
        s.scores.resize(size_t(PAIRED) * TILE_KEYS);
        s.out.assign(size_t(padded) * out_width, 0.0f);
        s.top.assign(padded, NONE), s.sum.assign(padded, 0.0f), s.decay.resize(padded);
        pack_queries(step, item, width, s);
        s.row.resize(out_width);
    }
    void fill(const int32_t* slots, int num) {
        char *keys = s.narrow_k.data(), *packed = s.narrow_v.data(), *pair = packed + TILE_KEYS * v_row;
        for (int j = 0; j < num; ++j) copy_row<T>(step.key_row(slots[j], item.head), step.D, width, keys + j * k_row);
        const int full = round_up(num, PAIRED);
        std::memset(keys + num * k_row, 0, size_t(full - num) * k_row);
        for (int j = 0; j < full; j += 2) {
            const char *one = keys + j * k_row, *other = one + k_row;
            if (c.v) {
                for (int i = 0; i < 2; ++i) {
                    if (j + i < num) copy_row<T>(step.value_row(slots[j + i], item.head), step.Dv, out_width, pair + i * v_row);
                    else std::memset(pair + i * v_row, 0, size_t(v_row));
                }
                one = pair, other = pair + v_row;
            }
            for (int d = 0; d < out_width; d += PAIRED) {
                const ivec a = load_ints(one + 2 * d), b = load_ints(other + 2 * d);
                ivec* to = reinterpret_cast<ivec*>(packed + j * v_row + 4 * d);
                to[0] = first_pairs(a, b), to[1] = last_pairs(a, b);
            }
        }
    }
    // The scores of 32 rows, or of the last 16.
    void multiply(int r, int num) {
        const char* queries = s.narrow_q.data() + r * k_row;
        settle();
        for (int j = 0; j < num; j += PAIRED) {
            const char* keys = s.narrow_k.data() + j * k_row;
            float* scores = s.scores.data() + j * PAIRED;
            if (r + TILE < padded) tile_scores<2>(keys, queries, width, scores, PAIRED);
            else tile_scores<1>(keys, queries, width, scores, PAIRED);
        }
        settle();
    }
    // Makes earlier results of 16 rows relative to higher logits.
    __attribute__((noinline)) void rise(int r, const vec& old, const vec& top) {
        const vec factor = power(old - (top == NONE ? all(0.0f) : top));
        store(&s.top[r], top), store(&s.decay[r], factor), store(&s.sum[r], load(&s.sum[r]) * factor);
        scale_rows(s.out.data() + int64_t(r) * out_width, out_width, &s.decay[r], TILE);
    }
    // The weights of 16 rows.
    void weigh(const Seen& seen, int r, int key, int num) {
        float* scores = s.scores.data() + r % PAIRED;
        const float scaling = step.scaled_later() ? step.scaling : 1.0f;
        if (!step.scaled_later())
            for (int j = 0; j < num; ++j) {
                const vec x = load(scores + j * PAIRED) * step.scaling;
                store(scores + j * PAIRED, c.cap > 0 ? capped(x, c.cap) : x);
            }
        seen.hide(scores, PAIRED, r, key, 0, num);
        const int full = round_up(num, PAIRED);
        for (int j = num; j < full; ++j) store(scores + j * PAIRED, all(NONE));
        vec tops[4] = {all(NONE), all(NONE), all(NONE), all(NONE)};
        for (int j = 0; j < full; j += 4)
            for (int i = 0; i < 4; ++i) tops[i] = higher(load(scores + (j + i) * PAIRED), tops[i]);
        const vec highest = higher(higher(tops[0], tops[1]), higher(tops[2], tops[3])) * scaling;
        const vec old = load(&s.top[r]), top = highest > old + SLACK ? highest : old, safe = top == NONE ? all(0.0f) : top;
        if (_mm512_cmp_ps_mask((__m512)old, (__m512)top, _CMP_NEQ_UQ)) rise(r, old, top);
        const ivec ones = (ivec)_mm512_set1_epi32(0x3f803f80);
        vec sums[2] = {load(&s.sum[r]), vec{}};
        char* tile = s.weights.data() + r % PAIRED * TILE_KEYS * 2;
        for (int half = 0; half < full; half += PAIRED, tile += 1024) {
            ivec words[TILE];
#pragma GCC unroll 16
            for (int i = 0; i < TILE; ++i) {
                const float* at = scores + (half + 2 * i) * PAIRED;
                words[i] = upper_halves(weight_of(load(at) * scaling - safe), weight_of(load(at + PAIRED) * scaling - safe));
                sums[i % 2] = add_pairs(sums[i % 2], words[i], ones);
            }
            turn(words);
            for (int i = 0; i < TILE; ++i) *reinterpret_cast<loose_ints*>(tile + 64 * i) = words[i];
        }
        store(&s.sum[r], sums[0] + sums[1]);
    }
    void gather(int r, int num) {
        settle();
        const int num_halves = (num + PAIRED - 1) / PAIRED;
        for (int d = 0; d < out_width; d += PAIRED) {
            const char *weights = s.weights.data(), *values = s.narrow_v.data() + 4 * d;
            float* out = s.out.data() + int64_t(r) * out_width + d;
            if (r + TILE < padded) tile_mix<2>(weights, values, out_width, num_halves, out, out_width);
            else tile_mix<1>(weights, values, out_width, num_halves, out, out_width);
        }
        settle();
    }
    // 32 rows at a time, so that their scores and weights stay in the first cache.
    void meet(const Seen& seen, int key, int num, const int32_t* next, int num_next) {
        for (int r = 0; r < padded; r += PAIRED) {
            const int end = std::min(padded, r + PAIRED);
            fetch_rows<T>(step, item, next, num_next * r / padded, num_next * end / padded);
            int low, high;
            seen.bounds(r, end - r, key, num, low, high);
            if (low >= high) continue;
            multiply(r, num);
            for (int at = r; at < end; at += TILE) weigh(seen, at, key, num);
            gather(r, num);
        }
    }
    void run() {
        const TileShapes shapes;
        _tile_loadconfig(&shapes);
        prepare();
        const Seen seen(step, item, s, padded);
        const int32_t* slots = step.slots(item);
        for (int key = item.key; key < item.key_end; key += TILE_KEYS) {
            const int num = std::min(TILE_KEYS, item.key_end - key), left = item.key_end - key - num;
            fill(slots + key, num);
            meet(seen, key, num, slots + key + num, std::min(TILE_KEYS, left));
        }
        _tile_release();
        for (int r = 0; r < height; ++r) {
            const float* out = s.out.data() + int64_t(r) * out_width;
            for (int d = 0; d < out_width; d += PAIRED) restore_pairs(load(out + d), load(out + d + W), s.row.data() + d);
            finish(step, item, item.head, r, s.row.data(), s.top[r], s.sum[r]);
        }
    }
};

static inline void tiles(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case E4M3: return Tiles<E4M3>{step, item, s}.run();
    case E5M2: return Tiles<E5M2>{step, item, s}.run();
    default: return Tiles<BF16>{step, item, s}.run();
    }
}
#else
constexpr bool HAS_TILES = false;
static inline bool ask_for_tiles() { return false; }
static inline void tiles(Step&, const Item&, Scratch&) {}
#endif
