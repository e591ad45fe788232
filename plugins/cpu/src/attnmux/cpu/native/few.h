// Few queries over 16-bit or 8-bit rows, as products of pairs of bfloat16 (AVX-512-BF16): decoding.
//
// A vector of Q has P rows of L words (of two values), P * L = 16. L words of a key are broadcast, for
// all vectors of Q, so that a logit is the sum of L lanes: those of L keys become one vector, lane =
// row * L + key. V is paired key by key. A few keys at a time meet all heads, as rows are fetched in
// the order of memory, or all keys of a block meet one head after another (few_blocks.h).
#pragma once

#include "columns.h"
#include "few_blocks.h"

#if defined(__AVX512BF16__) && LANES == 16

constexpr int SPARE_KEYS = W;  // after a block's, as products take several at a time

// V vectors of P rows for each KV head.
template <Type T, int P, int V> struct Few {
    // With few products for each line of 16-bit rows, reading is what bounds: then fetches are held back,
    // and a line of each of 16 rows is read before the next line of them.
    static constexpr bool HELD = FETCHES_FAR && size_of(T) == 2 && P * V <= 4;
    static constexpr int L = W / P, J = DOT_KEYS, SIZE = size_of(T), KEYS = SIZE == 1 || HELD ? 16 : 8, FAR = HELD ? 2 * AHEAD : AHEAD;
    // With more of them V is read head by head, all keys of a block.
    static constexpr bool BY_BLOCKS = FETCHES_FAR && !HELD && P * V <= 8;
    static constexpr int LOGITS = (STREAM_KEYS + SPARE_KEYS) * P, WORDS = LOGITS / 2;  // of a vector of rows
    Step& step;
    const Item& item;
    Scratch& s;
    const Call& c = step.call;
    const int num_heads = item.head_end - item.head, height = step.height(item);
    const int width = step.width, out_width = step.out_width;
    // Bytes are read where they lie, or copied as bfloat16.
    const bool dots_bytes = SIZE == 1 && P == 4 && LOOKS_BYTES_UP && step.D % (2 * BLOCK) == 0;
    const bool mixes_bytes = SIZE == 1 && LOOKS_BYTES_UP && step.Dv % (2 * BLOCK) == 0;
    const bool copies_k = (T != BF16 && !dots_bytes) || step.D % BLOCK;
    const bool copies_v = (T != BF16 && !mixes_bytes) || step.Dv % BLOCK;
    const bool by_blocks = BY_BLOCKS && c.v && (SIZE == 1 ? mixes_bytes && height > 1 : !copies_v);
    const int num_vectors = num_heads * V;
    const char* copied[STREAM_KEYS + SPARE_KEYS];
    Pace<HELD> pace = {};

    // A row's sums of the 32 columns from the d-th on: blocks of columns, [height][BLOCK] each.
    float* out_of(int h, int r, int d) const { return s.out.data() + int64_t(h) * height * out_width + int64_t(d) * height + r * BLOCK; }
    void prepare() {
        const int64_t vector_bytes = int64_t(P) * width * 2;
        s.narrow_q.assign(size_t(num_vectors * vector_bytes), 0);
        s.row.resize(std::max(width, out_width));
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                char* row = reinterpret_cast<char*>(s.row.data());
                std::memset(row, 0, size_t(width) * 2);
                step.narrow_query(item, item.head + h, r, row);
                if (dots_bytes) {
                    std::memcpy(s.narrow_q.data() + h * V * vector_bytes + int64_t(r) * width * 2, row, size_t(width) * 2);
                    continue;
                }
                char* to = s.narrow_q.data() + h * V * vector_bytes + r / P * 64 + r % P * L * 4;
                for (int at = 0; at < 2 * width; at += L * 4) std::memcpy(to + int64_t(at) * P * V, row + at, L * 4);
            }
        if (copies_k) s.narrow_k.resize(size_t(STREAM_KEYS) * width * 2);
        if (copies_v) s.narrow_v.resize(size_t(STREAM_KEYS) * out_width * 2);
        s.scores.resize(size_t(num_vectors) * LOGITS);
        s.pairs.resize(size_t(num_vectors) * WORDS);
        s.out.assign(size_t(num_heads) * height * out_width, 0.0f);
        s.top.assign(num_vectors * W, NONE), s.sum.assign(num_vectors * W, 0.0f), s.decay.resize(num_vectors * W);
    }
    // The block's rows of a head in bfloat16, in a multiple of 32 values, `offset` on from the first head's.
    const char* const* narrowed(const char* const* rows, int num, int64_t offset, int n, int to, Aligned<char>& copies) {
        for (int j = 0; j < num; ++j) copied[j] = copies.data() + int64_t(j) * to * 2;
        if (T != BF16 && LOOKS_BYTES_UP) look_rows_up(T == E4M3 ? E4M3_TABLE : E5M2_TABLE, rows, num, offset, n, to, copies.data());
        else for (int j = 0; j < num; ++j) copy_row<T>(rows[j] + offset, n, to, copies.data() + int64_t(j) * to * 2);
        std::fill(copied + num, copied + num + SPARE_KEYS, copied[num - 1]);
        return copied;
    }
    template <int R> void dot_bytes(const char* const* rows, int64_t offset, int h, int j, const Next& next) {
        if (height == R) return byte_logits<T, R>(rows, offset, s.narrow_q.data() + int64_t(h) * V * P * width * 2, width, step.scaling, s.scores.data() + h * V * LOGITS + j * P, LOGITS, next);
        if constexpr (R > 1) dot_bytes<R - 1>(rows, offset, h, j, next);
    }
    void multiply(const Rows<T>& keys, int num) {
        Ahead<T, FAR> ahead(keys, step.D, num_heads, height);
        for (int j = 0; j < num; j += J)
            for (int h = 0; h < num_heads; ++h) {
                const Next next = ahead.next(j, h, J, step.D);
                const int64_t offset = h * keys.head_bytes;
                if constexpr (SIZE == 1 && P == 4)
                    if (dots_bytes) {
                        dot_bytes<P * V>(keys.of + j, offset, h, j, next);
                        continue;
                    }
                const char* const* rows = copies_k ? narrowed(keys.of + j, std::min(J, num - j), offset, step.D, width, s.narrow_k) : keys.of + j;
                few_logits<T, P, V, J, HELD>(rows, copies_k ? 0 : offset, s.narrow_q.data() + int64_t(h) * V * P * width * 2, width, step.scaling, s.scores.data() + h * V * LOGITS + j * P, LOGITS, next, pace);
            }
    }
    // Removes what rows do not see, in all lanes of a head.
    void hide(const Seen& seen, float* logits, int first_row, int key, int num, int num_groups) const {
        ivec from, to, hidden_from = {}, hidden_to = {}, place;
        for (int i = 0; i < W; ++i) {
            const int r = first_row + i / L;
            from[i] = s.first[r], to[i] = std::min(s.end[r], key + num), place[i] = key + i % L;
            if (c.hidden_from) hidden_from[i] = s.hidden_from[r], hidden_to[i] = s.hidden_to[r];
        }
        for (int v = 0; v < num_groups; ++v, place += L) {
            ivec keep = (from <= place) & (to > place);
            if (c.hidden_from) keep &= (hidden_from > place) | (hidden_to <= place);
            store(logits + v * W, keep ? load(logits + v * W) : all(NONE));
        }
        if (!c.mask) return;
        for (int r = first_row; r < std::min(first_row + P, height); ++r) {
            const int token = seen.token_of(r);
            const uint8_t* keep = c.mask + c.mask_row[token];
            const int64_t start = std::max<int64_t>({c.mask_start[token], s.first[r], key}), end = std::min(s.end[r], key + num);
            for (int64_t k = start; k < end; ++k)
                if (!keep[k]) logits[(k - key) / L * W + r % P * L + (k - key) % L] = NONE;
        }
    }
    // The v-th vector of rows.
    void weigh(const Seen& seen, int v, int key, int num, int num_groups, bool whole) {
        float* logits = s.scores.data() + v * LOGITS;
        int32_t* words = s.pairs.data() + v * WORDS;
        if (c.cap > 0)
            for (int g = 0; g < num_groups; ++g) store(logits + g * W, capped(load(logits + g * W), c.cap));
        if (!whole) hide(seen, logits, v % V * P, key, num, num_groups);
        const vec old = load(&s.top[v * W]);
        vec tops[2] = {old, old};
        for (int g = 0; g < num_groups; ++g) tops[g % 2] = higher(load(logits + g * W), tops[g % 2]);
        const vec top = most_of<L>(higher(tops[0], tops[1])), safe = top == NONE ? all(0.0f) : top, factor = power(old - safe);
        vec sum = load(&s.sum[v * W]) * factor;
        for (int g = 0; g < num_groups; ++g) {
            const vec weights = rough_power(load(logits + g * W) - safe);
            sum += weights;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + g * W / 2), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
        }
        store(&s.top[v * W], top), store(&s.sum[v * W], sum), store(&s.decay[v * W], factor);
    }
    float decay_of(int h, int r) const { return s.decay[(h * V + r / P) * W + r % P * L]; }
    void scale(int h, int r, float decay) {
        if (decay == 1.0f) return;
        float* out = out_of(h, r, 0);
        for (int d = 0; d < out_width; d += BLOCK, out += height * BLOCK) store(out, load(out) * decay), store(out + W, load(out + W) * decay);
    }
    template <int R> void mix(const char* const* rows, int64_t offset, int h, int r, int j, int num_groups, const Lines<KEYS>& lines) {
        constexpr int C = HELD || R > 4 ? 1 : R > 2 ? 2 : 4;
        const int32_t* words = s.pairs.data() + (h * V + r / P) * WORDS + j / 2 * P;
        const int64_t block = int64_t(height) * BLOCK;
        if constexpr (SIZE == 1)
            if (mixes_bytes) {
                constexpr int PARTS = R > 4 ? 1 : 2;
                for (int d = 0; d < out_width; d += 2 * BLOCK)
                    for (int part = 0; part < 2; part += PARTS) byte_mix<T, P, R, PARTS>(rows, offset, words, WORDS, num_groups, out_of(h, r, d + part * BLOCK), block, d, part, lines);
                return;
            }
        int d = 0;
        for (; d + C * BLOCK <= out_width; d += C * BLOCK) few_mix<P, R, C>(rows, offset, words, WORDS, num_groups, out_of(h, r, d), block, d, lines, pace);
        for (; d < out_width; d += BLOCK) few_mix<P, R, 1>(rows, offset, words, WORDS, num_groups, out_of(h, r, d), block, d, lines, pace);
    }
    template <int R> void mix_rows(const char* const* rows, int64_t offset, int h, int r, int left, int j, int num_groups, const Lines<KEYS>& lines) {
        if (left == R) return mix<R>(rows, offset, h, r, j, num_groups, lines);
        if constexpr (R > 1) mix_rows<R - 1>(rows, offset, h, r, left, j, num_groups, lines);
    }
    void gather(const Rows<T>& values, int num) {
        Ahead<T, FAR> ahead(values, step.Dv, num_heads, height);
        for (int j = 0; j < num; j += KEYS) {
            const int now = std::min(KEYS, num - j), num_groups = round_up(now, L) / L;
            for (int h = 0; h < num_heads; ++h) {
                const Lines<KEYS> lines(c.v ? ahead.next(j, h, KEYS, step.Dv) : Next(), s.out.data()), none(Next(), s.out.data());
                const int64_t offset = h * values.head_bytes;
                const char* const* rows = copies_v ? narrowed(values.of + j, now, offset, step.Dv, out_width, s.narrow_v) : values.of + j;
                for (int r = 0; r < height; r += 8) mix_rows<std::min(P * V, 8)>(rows, copies_v ? 0 : offset, h, r, std::min(8, height - r), j, num_groups, r ? none : lines);
            }
        }
    }
    template <int R, bool RUN> void mix_block(const Rows<T>& values, Ahead<T, STREAM_KEYS>& ahead, int h, int num) {
        constexpr int COLUMNS = SIZE == 1 ? 2 * BLOCK : BLOCK;
        const int64_t offset = h * values.head_bytes, block = int64_t(height) * BLOCK;
        const int32_t* words = s.pairs.data() + h * V * WORDS;
        float decay[R];
        for (int r = 0; r < R; ++r) decay[r] = decay_of(h, r);
        const char* runs[STREAM_KEYS / 8];
        for (int d = 0; d < out_width; d += COLUMNS) {
            if constexpr (RUN)
                for (int j = 0; j < num; j += 8) runs[j / 8] = ahead.next(j, h, 8, COLUMNS).run;
            const Course<RUN> course = {RUN ? runs : values.of + STREAM_KEYS, offset + d * SIZE};
            if constexpr (SIZE == 1) {
                constexpr int PARTS = R > 4 ? 1 : 2;
                for (int part = 0; part < 2; part += PARTS) byte_block_mix<T, P, R, PARTS, RUN>(values.of, offset + d, words, WORDS, num, decay, out_of(h, 0, d + part * BLOCK), block, part, course);
            } else block_mix<P, R, 1, RUN>(values.of, offset + 2 * d, words, WORDS, num, decay, out_of(h, 0, d), block, course);
        }
    }
    template <int R> void mix_block_rows(const Rows<T>& values, Ahead<T, STREAM_KEYS>& ahead, int h, int num) {
        if (height == R) return ahead.in_order ? mix_block<R, true>(values, ahead, h, num) : mix_block<R, false>(values, ahead, h, num);
        if constexpr (R > 1) mix_block_rows<R - 1>(values, ahead, h, num);
    }
    void gather_block(const Rows<T>& values, int num) {
        Ahead<T, STREAM_KEYS> ahead(values, step.Dv, num_heads, height);
        for (int h = 0; h < num_heads; ++h) mix_block_rows<P * V>(values, ahead, h, round_up(num, 8));
    }
    void run() {
        prepare();
        const Seen seen(step, item, s, W);
        const int32_t* slots = step.slots(item);
        // The item that is likely to be this thread's next
        const Item* then = step.coming();
        const int32_t* then_slots = then ? step.slots(*then) + then->key : nullptr;
        const int num_then = then ? then->key_end - then->key : 0;
        Rows<T> keys, values;
        for (int key = item.key; key < item.key_end; key += STREAM_KEYS) {
            const int left = item.key_end - key, num = std::min(STREAM_KEYS, left), num_groups = round_up(num, 8) / L;
            keys.find(step, false, slots + key, left, item.head, then_slots, num_then);
            values.find(step, true, slots + key, left, item.head, then_slots, num_then);
            multiply(keys, num);
            const bool whole = seen.whole(key, num) && num % 8 == 0;
            for (int v = 0; v < num_vectors; ++v) weigh(seen, v, key, num, num_groups, whole);
            if constexpr (BY_BLOCKS)
                if (by_blocks) {
                    gather_block(values, num);
                    continue;
                }
            for (int h = 0; h < num_heads; ++h)
                for (int r = 0; r < height; ++r) scale(h, r, decay_of(h, r));
            gather(values, num);
        }
        for (int h = 0; h < num_heads; ++h)
            for (int r = 0; r < height; ++r) {
                if (mixes_bytes)
                    for (int d = 0; d < out_width; d += 2 * BLOCK) restore_bytes(out_of(h, r, d), out_of(h, r, d + BLOCK), s.row.data() + d);
                else
                    for (int d = 0; d < out_width; d += BLOCK) restore_pairs(load(out_of(h, r, d)), load(out_of(h, r, d) + W), s.row.data() + d);
                const int at = (h * V + r / P) * W, lane = r % P * L;
                finish(step, item, item.head + h, r, s.row.data(), s.top[at + lane], total_of<L>(load(&s.sum[at]))[lane]);
            }
    }
};

template <Type T> static inline void few_of(Step& step, const Item& item, Scratch& s) {
    const int height = step.height(item);
    if (size_of(T) == 1 && LOOKS_BYTES_UP && height <= 4) Few<T, 4, 1>{step, item, s}.run();
    else if (height <= 2) Few<T, 2, 1>{step, item, s}.run();
    else if (height <= 4) Few<T, 2, 2>{step, item, s}.run();
    else if (height <= 8) Few<T, 4, 2>{step, item, s}.run();
    else Few<T, 8, 2>{step, item, s}.run();
}
static inline void few(Step& step, const Item& item, Scratch& s) {
    switch (step.kv_type) {
    case E4M3: return few_of<E4M3>(step, item, s);
    case E5M2: return few_of<E5M2>(step, item, s);
    default: return few_of<BF16>(step, item, s);
    }
}
#else
static inline void few(Step&, const Item&, Scratch&) {}
#endif
