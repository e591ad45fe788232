// Few queries over bfloat16 rows on Intel's matrix unit (AMX): decoding where heads share keys.
//
// scores[key][lane] = K . Q', so that rows of K are tiles as they lie, if 16 of them are equally far
// apart; else they are copied. The rows of as many KV heads as fit lie side by side in 16 lanes, so that
// weights are computed for all of them at once. V is packed in pairs of keys, head by head.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__) && LANES == 16

constexpr int FEW_TILES_KEYS = 64;  // of a block

// Tiles 0 and 1: scores; 2: Q; 3 and 7: K or V; 4 and 5: sums over V; 6: weights.
struct alignas(64) FewShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit FewShapes(int height) {
        const auto shape = [&](int tile, int height_of, int width) { rows[tile] = uint8_t(height_of), row_bytes[tile] = uint16_t(4 * width); };
        for (int tile : {0, 1, 2}) shape(tile, TILE, height);
        for (int tile : {3, 7}) shape(tile, TILE, TILE);
        for (int tile : {4, 5, 6}) shape(tile, height, TILE);
    }
};

struct FewTiles {
    static constexpr int KEYS = FEW_TILES_KEYS, GROUPS = KEYS / TILE;
    static constexpr int64_t TILE_BYTES = 1024;
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int num_heads = item.head_end - item.head, height = step.height(item);
    const int per_tile = TILE / height, lanes = per_tile * height, num_tiles = (num_heads + per_tile - 1) / per_tile;
    const int width = round_up(step.D, PAIRED), out_width = round_up(step.Dv, PAIRED);
    const int64_t key_bytes = c.k_slot * 2, key_head = c.k_head * 2, value_bytes = (c.v ? c.v_slot : c.k_slot) * 2, value_head = (c.v ? c.v_head : c.k_head) * 2;
    const int64_t half_bytes = int64_t(out_width) / PAIRED * 2 * TILE_BYTES, v_bytes = KEYS / PAIRED * half_bytes;  // of packed V
    alignas(64) const char *keys[KEYS], *values[KEYS];  // rows of the first head
    bool in_order[GROUPS];

    float* out_of(int h, int r, int d) const { return s.out.data() + int64_t(h) * height * out_width + int64_t(d) * height + r * PAIRED; }
    void prepare() {
        s.narrow_q.assign(size_t(num_heads) * width / PAIRED * TILE_BYTES, 0);
        s.row.resize(std::max(width, out_width));
        int32_t* words = reinterpret_cast<int32_t*>(s.row.data());
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                std::memset(words, 0, size_t(width) * 2);
                step.narrow_query(item, item.head + h, r, reinterpret_cast<char*>(words));
                int32_t* to = reinterpret_cast<int32_t*>(s.narrow_q.data() + int64_t(h) * width / PAIRED * TILE_BYTES) + r;
                for (int i = 0; i < width / 2; ++i) to[i * TILE] = words[i];
            }
        s.narrow_k.assign(size_t(TILE) * 2 * width * 2, 0);
        s.narrow_v.resize(size_t(num_heads) * KEYS * out_width * 2);
        s.scores.assign(size_t(num_tiles) * KEYS * W, 0.0f);
        s.weights.resize(size_t(num_tiles) * KEYS * W * 2);
        s.out.assign(size_t(num_heads) * height * out_width, 0.0f);
        s.top.assign(num_tiles * W, NONE), s.sum.assign(num_tiles * W, 0.0f), s.decay.resize(num_tiles * W);
    }
    // Where rows of 16 slots begin.
    static void place(const int32_t* slots, const void* first, int64_t stride, const char** rows) {
        for (int i = 0; i < TILE; i += 8) {
            const __m512i wide = _mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slots + i)));
            _mm512_storeu_si512(rows + i, _mm512_add_epi64(_mm512_mul_epi32(wide, _mm512_set1_epi64(stride)), _mm512_set1_epi64(reinterpret_cast<int64_t>(first))));
        }
    }
    void find(const int32_t* slots, int left) {
        int32_t repeated[KEYS];
        if (left < KEYS) {
            for (int j = 0; j < KEYS; ++j) repeated[j] = slots[std::min(j, left - 1)];
            slots = repeated;
        }
        const void *key = step.key_row(0, item.head), *value = step.value_row(0, item.head);
        for (int j = 0; j < KEYS; j += TILE) {
            place(slots + j, key, key_bytes, keys + j);
            place(slots + j, value, value_bytes, values + j);
        }
        const ivec counted = (ivec)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int g = 0; g < GROUPS; ++g) {
            const ivec others = load_ints(slots + g * TILE) - slots[g * TILE];
            in_order[g] = step.D == width && _mm512_cmpeq_epi32_mask((__m512i)others, (__m512i)counted) == 0xffff;
        }
    }
    // 16 rows of K of a head, where they lie or copied.
    const char* group(int g, int h, char* copies, int64_t& stride) const {
        if (in_order[g]) {
            stride = key_bytes;
            return keys[g * TILE] + h * key_head;
        }
        stride = int64_t(width) * 2;
        for (int i = 0; i < TILE; ++i) std::memcpy(copies + i * stride, keys[g * TILE + i] + h * key_head, size_t(step.D) * 2);
        return copies;
    }
    // The scores of two groups of keys.
    void multiply(int h, int g) {
        const char* q = s.narrow_q.data() + int64_t(h) * width / PAIRED * TILE_BYTES;
        float* scores = s.scores.data() + (int64_t(h / per_tile) * KEYS + g * TILE) * W + h % per_tile * height;
        char* copies = s.narrow_k.data();
        int64_t stride, more_stride;
        const char *one = group(g, h, copies, stride), *other = group(g + 1, h, copies + int64_t(TILE) * width * 2, more_stride);
        settle();
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < width; d += PAIRED) {
            _tile_loadd(2, q + d / PAIRED * TILE_BYTES, 64);
            _tile_loadd(3, one + 2 * d, stride);
            _tile_dpbf16ps(0, 3, 2);
            _tile_loadd(7, other + 2 * d, more_stride);
            _tile_dpbf16ps(1, 7, 2);
        }
        _tile_stored(0, scores, 64);
        _tile_stored(1, scores + TILE * W, 64);
        settle();
    }
    // V of 32 keys of all heads, in pairs of keys.
    template <bool WHOLE> void pack(int begin) {
        for (int j = begin; j < begin + PAIRED; j += 2)
            for (int h = 0; h < num_heads; ++h) {
                const char *one = values[j] + h * value_head, *other = values[j + 1] + h * value_head;
                char* to = s.narrow_v.data() + h * v_bytes + j / PAIRED * half_bytes + j % PAIRED / 2 * 64;
                for (int d = 0; d < out_width; d += PAIRED, to += 2 * TILE_BYTES) {
                    const ivec a = loaded<WHOLE>(one + 2 * d, step.Dv - d), b = loaded<WHOLE>(other + 2 * d, step.Dv - d);
                    *reinterpret_cast<ivec*>(to) = first_pairs(a, b), *reinterpret_cast<ivec*>(to + TILE_BYTES) = last_pairs(a, b);
                }
            }
    }
    void weigh(const Seen& seen, int t, int key, int num) {
        float* scores = s.scores.data() + int64_t(t) * KEYS * W;
        const float scaling = step.scaled_later() ? step.scaling : 1.0f;
        if (!step.scaled_later())
            for (int j = 0; j < num; ++j) {
                const vec x = load(scores + j * W) * step.scaling;
                store(scores + j * W, c.cap > 0 ? capped(x, c.cap) : x);
            }
        seen.hide(scores, W, t * lanes, key, 0, num);
        const int full = round_up(num, PAIRED);
        for (int j = num; j < full; ++j) store(scores + j * W, all(NONE));
        const vec old = load(&s.top[t * W]);
        vec tops[4] = {all(NONE), all(NONE), all(NONE), all(NONE)};
        for (int j = 0; j < full; j += 4)
            for (int i = 0; i < 4; ++i) tops[i] = higher(load(scores + (j + i) * W), tops[i]);
        const vec top = higher(higher(higher(tops[0], tops[1]), higher(tops[2], tops[3])) * scaling, old);
        const vec safe = top == NONE ? all(0.0f) : top, factor = power(old - safe);
        vec sum = load(&s.sum[t * W]) * factor;
        for (int half = 0; half < full; half += PAIRED) {
            ivec pairs[TILE];
            for (int i = 0; i < TILE; ++i) {
                const vec one = rough_power(load(scores + (half + 2 * i) * W) * scaling - safe), other = rough_power(load(scores + (half + 2 * i + 1) * W) * scaling - safe);
                sum += one + other;
                pairs[i] = rounded_pairs(one, other);
            }
            turn(pairs);
            char* tile = s.weights.data() + int64_t(t) * KEYS * W * 2 + half / PAIRED * TILE_BYTES;
            for (int i = 0; i < TILE; ++i) *reinterpret_cast<loose_ints*>(tile + 64 * i) = pairs[i];
        }
        store(&s.top[t * W], top), store(&s.sum[t * W], sum), store(&s.decay[t * W], factor);
    }
    void scale(int h) {
        const float* decay = &s.decay[h / per_tile * W + h % per_tile * height];
        for (int r = 0; r < height; ++r) {
            if (decay[r] == 1.0f) continue;
            float* out = out_of(h, r, 0);
            for (int d = 0; d < out_width; d += PAIRED, out += height * PAIRED) store(out, load(out) * decay[r]), store(out + W, load(out + W) * decay[r]);
        }
    }
    // 32 columns of a row, or the n that are left.
    template <bool WHOLE> static ivec loaded(const char* from, int n) {
        if (WHOLE || n >= PAIRED) return load_ints(from);
        return (ivec)_mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, from);
    }
    void gather(int h, int num_halves) {
        const char* weights = s.weights.data() + int64_t(h / per_tile) * KEYS * W * 2 + h % per_tile * height * 64;
        for (int d = 0; d < out_width; d += PAIRED) {
            float* out = out_of(h, 0, d);
            _tile_loadd(4, out, 4 * PAIRED);
            _tile_loadd(5, out + W, 4 * PAIRED);
            for (int half = 0; half < num_halves; ++half) {
                const char* v = s.narrow_v.data() + h * v_bytes + half * half_bytes + d / PAIRED * 2 * TILE_BYTES;
                _tile_loadd(6, weights + half * TILE_BYTES, 64);
                _tile_loadd(3, v, 64);
                _tile_dpbf16ps(4, 6, 3);
                _tile_loadd(7, v + TILE_BYTES, 64);
                _tile_dpbf16ps(5, 6, 7);
            }
            _tile_stored(4, out, 4 * PAIRED);
            _tile_stored(5, out + W, 4 * PAIRED);
        }
    }
    void run() {
        const FewShapes shapes(height);
        _tile_loadconfig(&shapes);
        prepare();
        const Seen seen(step, item, s, num_tiles * lanes + W);
        const int32_t* slots = step.slots(item);
        for (int key = item.key; key < item.key_end; key += KEYS) {
            const int num = std::min(KEYS, item.key_end - key), num_halves = (num + PAIRED - 1) / PAIRED;
            find(slots + key, item.key_end - key);
            // K and V of a few keys at a time, since the CPU fetches on its own what follows them. Fetches
            // by the program make it slower: benchmarks/results/native-cpu.md.
            for (int half = 0; half < num_halves; ++half) {
                for (int h = 0; h < num_heads; ++h) multiply(h, 2 * half);
                if (step.Dv == out_width) pack<true>(half * PAIRED);
                else pack<false>(half * PAIRED);
            }
            for (int t = 0; t < num_tiles; ++t) weigh(seen, t, key, num);
            settle();
            for (int h = 0; h < num_heads; ++h) {
                scale(h);
                settle();
                gather(h, num_halves);
                settle();
            }
        }
        _tile_release();
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                for (int d = 0; d < out_width; d += PAIRED) restore_pairs(load(out_of(h, r, d)), load(out_of(h, r, d) + W), s.row.data() + d);
                const int at = h / per_tile * W + h % per_tile * height + r;
                finish(step, item, item.head + h, r, s.row.data(), s.top[at], s.sum[at]);
            }
    }
};

static inline void few_tiles(Step& step, const Item& item, Scratch& s) { FewTiles{step, item, s}.run(); }
#else
static inline void few_tiles(Step&, const Item&, Scratch&) {}
#endif
