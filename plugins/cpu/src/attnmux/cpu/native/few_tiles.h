// Few queries over bfloat16 rows on Intel's matrix unit (AMX): decoding where heads share keys.
//
// Rows of K and V are tiles as they lie, if 16 of them follow each other; else they are copied. Nothing
// else is written per key but scores and weights, as what the first cache has no room for is slow to
// write. scores[key][lane] = K . Q', with the rows of as many KV heads as fit side by side in 16
// lanes: Q of a head is 0 in the lanes of others, so that one tile adds them all. A pair of V's values
// is of one key and not of two, so the even columns are added by weights (w, 0), the odd by (0, w).
// A value that is not finite reaches what shares its tile or its pair.
#pragma once

#include "tiles.h"
#include "walk.h"

#if defined(__AMX_BF16__) && LANES == 16

constexpr int FEW_TILES_KEYS = 32;   // of a block; with 64 the first cache is short
constexpr int FEW_TILES_AHEAD = 32;  // keys between those that are read and those that are fetched

// Tile 0: scores; 1: weights; 2 to 5: sums over V; 6 and 7: K, V or Q.
struct alignas(64) FewShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    explicit FewShapes(int height) {
        for (int tile : {0, 6, 7}) rows[tile] = TILE;
        for (int tile : {1, 2, 3, 4, 5}) rows[tile] = uint8_t(height);
    }
};

struct FewTiles {
    static constexpr int KEYS = FEW_TILES_KEYS, GROUPS = KEYS / TILE;
    static constexpr int64_t TILE_BYTES = 1024;
    // Lines are fetched evenly over the time of a block, as bursts wait: shares of a product of K, of a pair of
    // weights and of a product of V.
    static constexpr int KEY_SHARE = 4, WEIGHT_SHARE = 1, VALUE_SHARE = 3;
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int num_heads = item.head_end - item.head, height = step.height(item);
    const int per_tile = TILE / height, lanes = per_tile * height, num_tiles = (num_heads + per_tile - 1) / per_tile;
    const int width = round_up(step.D, PAIRED), out_width = round_up(step.Dv, PAIRED);
    const int64_t key_bytes = c.k_slot * 2, key_head = c.k_head * 2, value_bytes = (c.v ? c.v_slot : c.k_slot) * 2, value_head = (c.v ? c.v_head : c.k_head) * 2;
    const char *const first_key = step.key_row(0, item.head), *const first_value = step.value_row(0, item.head);
    int32_t repeated[KEYS];
    const int32_t* slots;  // of a block, the last one repeated
    const char *keys[GROUPS], *values[GROUPS];  // where 16 rows of the first head begin; null: they are copied
    Walk walk{step, item};
    unsigned sixteenths = 0, owed = 0;  // of lines: that a share fetches, and that are left over

    void fetch(int shares) {
        owed += unsigned(shares) * sixteenths;
        walk.fetch(int(owed / 16)), owed %= 16;
    }
    // Sums of a head: blocks of 32 columns, [height][16 even, 16 odd].
    float* out_of(int h, int d) const { return s.out.data() + (int64_t(h) * out_width + d) * height; }
    char* q_of(int h, int d) const { return s.narrow_q.data() + (int64_t(h) * width + d) / PAIRED * TILE_BYTES; }
    int end_of(int t) const { return std::min(num_heads, (t + 1) * per_tile); }
    // Q of 16 lanes, turned round, once for each of their heads.
    void pack(int t) {
        const int begin = t * per_tile, num = (end_of(t) - begin) * height;
        char* rows = reinterpret_cast<char*>(s.row.data());
        std::memset(rows, 0, size_t(TILE) * width * 2);
        for (int i = 0; i < num; ++i) step.narrow_query(item, item.head + begin + i / height, i % height, rows + int64_t(i) * width * 2);
        for (int d = 0; d < width; d += PAIRED) {
            ivec words[TILE];
            for (int i = 0; i < TILE; ++i) words[i] = load_ints(rows + (int64_t(i) * width + d) * 2);
            turn(words);
            for (int h = 0; h < num / height; ++h) {
                const __mmask16 own = __mmask16(((1 << height) - 1) << h * height);
                for (int i = 0; i < TILE; ++i) _mm512_store_si512(q_of(begin + h, d) + 64 * i, _mm512_maskz_mov_epi32(own, (__m512i)words[i]));
            }
        }
    }
    void prepare() {
        s.row.resize(std::max(TILE * width / 2, out_width));
        s.narrow_q.resize(size_t(num_heads) * width / PAIRED * TILE_BYTES);
        for (int t = 0; t < num_tiles; ++t) pack(t);
        s.narrow_k.resize(size_t(TILE) * width * 2), s.narrow_v.resize(size_t(TILE) * 2 * PAIRED * 2);
        s.scores.resize(size_t(KEYS) * W);
        s.weights.resize(size_t(2 * GROUPS) * TILE_BYTES);
        s.out.assign(size_t(num_heads) * height * out_width, 0.0f);
        s.top.assign(num_tiles * W, NONE), s.sum.assign(num_tiles * W, 0.0f), s.decay.resize(num_tiles * W);
        const int shares = KEY_SHARE * num_heads * width / PAIRED * GROUPS + WEIGHT_SHARE * num_tiles * KEYS / 2 + VALUE_SHARE * num_heads * out_width / PAIRED * 2 * GROUPS;
        sixteenths = unsigned((16 * walk.lines() * KEYS + shares - 1) / shares);
    }
    // The next block, and the rows to fetch meanwhile: of this item or of the one that is likely to be next.
    void find(const int32_t* from, int left) {
        slots = from;
        if (left < KEYS) {
            for (int j = 0; j < KEYS; ++j) repeated[j] = from[std::min(j, left - 1)];
            slots = repeated;
        }
        const ivec counted = (ivec)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int g = 0; g < GROUPS; ++g) {
            const int64_t slot = slots[g * TILE];
            const bool in_order = _mm512_cmpeq_epi32_mask((__m512i)(load_ints(slots + g * TILE) - int32_t(slot)), (__m512i)counted) == 0xffff;
            keys[g] = in_order && step.D == width ? first_key + slot * key_bytes : nullptr;
            values[g] = in_order && step.Dv == out_width ? first_value + slot * value_bytes : nullptr;
        }
        if (left > FEW_TILES_AHEAD) return walk.begin(from + FEW_TILES_AHEAD, std::min(KEYS, left - FEW_TILES_AHEAD));
        const Item* then = step.coming();
        if (then && then->head == item.head) walk.begin(step.slots(*then) + then->key, std::min(KEYS, then->key_end - then->key));
        else walk.begin(from, 0);
    }
    // 16 rows of `width` values, with zeros after the first n.
    __attribute__((noinline)) static const char* copy(const int32_t* of, const char* first, int64_t bytes, int n, int width, char* to) {
        char* at = to;
        for (int i = 0; i < TILE; ++i)
            for (int d = 0; d < width; d += PAIRED, at += 2 * PAIRED) {
                const __mmask32 kept = d + PAIRED <= n ? ~__mmask32(0) : (__mmask32(1) << std::max(n - d, 0)) - 1;
                _mm512_storeu_si512(at, _mm512_maskz_loadu_epi16(kept, first + of[i] * bytes + 2 * d));
            }
        settle();
        return to;
    }
    // The scores of a block in 16 lanes.
    void multiply(int t, int num_groups) {
        settle();
        for (int g = 0; g < num_groups; ++g) {
            _tile_zero(0);
            for (int h = t * per_tile; h < end_of(t); ++h) {
                const int64_t stride = keys[g] ? key_bytes : int64_t(width) * 2;
                const char* rows = keys[g] ? keys[g] + h * key_head : copy(slots + g * TILE, first_key + h * key_head, key_bytes, step.D, width, s.narrow_k.data());
                for (int d = 0; d < width; d += PAIRED) {
                    fetch(KEY_SHARE);
                    _tile_loadd(7, q_of(h, d), 64);
                    _tile_loadd(6, rows + 2 * d, stride);
                    _tile_dpbf16ps(0, 6, 7);
                }
            }
            _tile_stored(0, s.scores.data() + g * TILE * W, 64);
        }
        settle();
    }
    // Makes earlier results relative to higher logits.
    __attribute__((noinline)) void rise(int t, const vec& old, const vec& top) {
        const vec factor = power(old - (top == NONE ? all(0.0f) : top));
        store(&s.top[t * W], top), store(&s.decay[t * W], factor), store(&s.sum[t * W], load(&s.sum[t * W]) * factor);
        for (int h = t * per_tile; h < end_of(t); ++h)
            for (int r = 0; r < height; ++r) {
                const float decay = s.decay[t * W + h % per_tile * height + r];
                float* out = out_of(h, 0) + r * PAIRED;
                for (int d = 0; d < out_width; d += PAIRED, out += height * PAIRED) store(out, load(out) * decay), store(out + W, load(out + W) * decay);
            }
    }
    void weigh(const Seen& seen, int t, int key, int num) {
        float* scores = s.scores.data();
        const float scaling = step.scaled_later() ? step.scaling : 1.0f;
        if (!step.scaled_later())
            for (int j = 0; j < num; ++j) {
                const vec x = load(scores + j * W) * step.scaling;
                store(scores + j * W, c.cap > 0 ? capped(x, c.cap) : x);
            }
        seen.hide(scores, W, t * lanes, key, 0, num);
        for (int j = num; j < KEYS; ++j) store(scores + j * W, all(NONE));
        vec tops[4] = {all(NONE), all(NONE), all(NONE), all(NONE)};
        for (int j = 0; j < KEYS; j += 4)
            for (int i = 0; i < 4; ++i) tops[i] = higher(load(scores + (j + i) * W), tops[i]);
        const vec highest = higher(higher(tops[0], tops[1]), higher(tops[2], tops[3])) * scaling;
        const vec old = load(&s.top[t * W]), top = highest > old + SLACK ? highest : old, safe = top == NONE ? all(0.0f) : top;
        if (_mm512_cmp_ps_mask((__m512)old, (__m512)top, _CMP_NEQ_UQ)) rise(t, old, top);
        const ivec ones = (ivec)_mm512_set1_epi32(0x3f803f80);
        vec sums[2] = {load(&s.sum[t * W]), vec{}};
        ivec words[TILE];  // of the weights of two keys
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i) {
            const vec one = weight_of(load(scores + i * W) * scaling - safe), other = weight_of(load(scores + (TILE + i) * W) * scaling - safe);
            words[i] = upper_halves(one, other);
            sums[i % 2] = add_pairs(sums[i % 2], words[i], ones);
            fetch(WEIGHT_SHARE);
        }
        store(&s.sum[t * W], sums[0] + sums[1]);
        turn(words);
        char* to = s.weights.data();
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i, to += 64) {
            const __m512i x = (__m512i)words[i];
            _mm512_store_si512(to, _mm512_and_si512(x, _mm512_set1_epi32(0xffff)));
            _mm512_store_si512(to + TILE_BYTES, _mm512_slli_epi32(x, 16));
            _mm512_store_si512(to + 2 * TILE_BYTES, _mm512_srli_epi32(x, 16));
            _mm512_store_si512(to + 3 * TILE_BYTES, _mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000))));
        }
    }
    // Adds the values of a block to a head's sums of 32 columns, or of BOTH these and the next 32.
    template <bool BOTH> void gather(int h, int d, int num_groups) {
        constexpr int COLUMNS = BOTH ? 2 * PAIRED : PAIRED;
        const char* weights = s.weights.data() + h % per_tile * height * 64;
        float *out = out_of(h, d), *more = out + height * PAIRED;
        _tile_loadd(2, out, 4 * PAIRED);
        _tile_loadd(3, out + W, 4 * PAIRED);
        if (BOTH) { _tile_loadd(4, more, 4 * PAIRED); _tile_loadd(5, more + W, 4 * PAIRED); }
        for (int g = 0; g < num_groups; ++g, weights += 2 * TILE_BYTES) {
            fetch(VALUE_SHARE);
            const int64_t at = h * value_head + 2 * d, stride = values[g] ? value_bytes : 2 * COLUMNS;
            const char* rows = values[g] ? values[g] + at : copy(slots + g * TILE, first_value + at, value_bytes, step.Dv - d, COLUMNS, s.narrow_v.data());
            _tile_loadd(1, weights, 64);
            _tile_loadd(6, rows, stride);
            _tile_dpbf16ps(2, 1, 6);
            if (BOTH) { fetch(VALUE_SHARE); _tile_loadd(7, rows + 64, stride); _tile_dpbf16ps(4, 1, 7); }
            fetch(VALUE_SHARE);
            _tile_loadd(1, weights + TILE_BYTES, 64);
            _tile_dpbf16ps(3, 1, 6);
            if (BOTH) { fetch(VALUE_SHARE); _tile_dpbf16ps(5, 1, 7); }
        }
        _tile_stored(2, out, 4 * PAIRED);
        _tile_stored(3, out + W, 4 * PAIRED);
        if (BOTH) { _tile_stored(4, more, 4 * PAIRED); _tile_stored(5, more + W, 4 * PAIRED); }
    }
    void write_results() {
        const __m512i front = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                const float* out = out_of(h, 0) + r * PAIRED;
                for (int d = 0; d < out_width; d += PAIRED, out += height * PAIRED) {
                    const __m512 even = (__m512)load(out), odd = (__m512)load(out + W);
                    store(s.row.data() + d, (vec)_mm512_permutex2var_ps(even, front, odd)), store(s.row.data() + d + W, (vec)_mm512_permutex2var_ps(even, back, odd));
                }
                const int at = h / per_tile * W + h % per_tile * height + r;
                finish(step, item, item.head + h, r, s.row.data(), s.top[at], s.sum[at]);
            }
    }
    void run() {
        const FewShapes shapes(height);
        _tile_loadconfig(&shapes);
        prepare();
        const Seen seen(step, item, s, num_tiles * lanes + W);
        const int32_t* of = step.slots(item);
        for (int key = item.key; key < item.key_end; key += KEYS) {
            const int left = item.key_end - key, num = std::min(KEYS, left), num_groups = (num + TILE - 1) / TILE;
            find(of + key, left);
            for (int t = 0; t < num_tiles; ++t) {
                multiply(t, num_groups);
                weigh(seen, t, key, num);
                settle();
                for (int h = t * per_tile; h < end_of(t); ++h)
                    for (int d = 0; d < out_width; d += 2 * PAIRED) d + PAIRED < out_width ? gather<true>(h, d, num_groups) : gather<false>(h, d, num_groups);
                settle();
            }
        }
        _tile_release();
        write_results();
    }
};

static inline void few_tiles(Step& step, const Item& item, Scratch& s) { FewTiles{step, item, s}.run(); }
#else
static inline void few_tiles(Step&, const Item&, Scratch&) {}
#endif
