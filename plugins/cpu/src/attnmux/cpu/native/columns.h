// Logits of many queries, one query a lane: scores[key][row]. Maxima and sums need no shuffles. They
// are divided by ln 2, so that weights are powers of two.
#pragma once

#include "step.h"

// What the rows of an item see, by position; rows that only fill up the last vector are the last's.
struct Seen {
    const Step& step;
    const Item& item;
    Scratch& s;
    const int height = step.height(item), num_rows = (item.head_end - item.head) * height;
    int from = 0, to = std::numeric_limits<int>::max();  // all rows see the keys in between
    bool is_range;

    Seen(const Step& st, const Item& it, Scratch& scratch, int padded) : step(st), item(it), s(scratch) {
        const Call& c = step.call;
        is_range = !c.hidden_from && !c.mask;
        s.first.resize(padded), s.end.resize(padded);
        if (c.hidden_from) s.hidden_from.resize(padded), s.hidden_to.resize(padded);
        for (int r = 0; r < padded; ++r) {
            const int token = token_of(std::min(r, num_rows - 1));
            s.first[r] = int32_t(c.first[token]), s.end[r] = int32_t(c.end[token]);
            from = std::max(from, s.first[r]), to = std::min(to, s.end[r]);
            if (c.hidden_from) s.hidden_from[r] = int32_t(c.hidden_from[token]), s.hidden_to[r] = int32_t(c.hidden_to[token]);
        }
    }
    // Whether all rows see all of these keys.
    bool whole(int key, int num) const { return is_range && key >= from && key + num <= to; }
    // Which of these keys, counted from the first, some of `n` rows from the r-th on may see.
    void bounds(int r, int n, int key, int num, int& low, int& high) const {
        low = 0, high = num;
        if (whole(key, num)) return;
        low = num, high = 0;
        for (int i = r; i < r + n; ++i) low = std::min(low, s.first[i] - key), high = std::max(high, s.end[i] - key);
        low = std::max(low, 0), high = std::min(high, num);
        if (low >= high) low = high = 0;
    }
    int token_of(int r) const { return step.first_token(item) + r % height / step.group; }
    // Removes what the W rows from the r-th on do not see of the keys from low to high of a block.
    // logits: of these rows, `stride` floats from key to key.
    void hide(float* logits, int64_t stride, int r, int key, int low, int high) const {
        if (whole(key + low, high - low)) return;
        const Call& c = step.call;
        const ivec from = load_ints(&s.first[r]), to = load_ints(&s.end[r]);
        for (int j = low; j < high; ++j) {
            const int place = key + j;
            ivec keep = (from <= place) & (to > place);
            if (c.hidden_from) keep &= (load_ints(&s.hidden_from[r]) > place) | (load_ints(&s.hidden_to[r]) <= place);
            float* at = logits + j * stride;
            store(at, keep ? load(at) : all(NONE));
        }
        if (!c.mask) return;
        for (int i = 0; i < std::min(W, num_rows - r); ++i) {
            const int token = token_of(r + i);
            const uint8_t* keep = c.mask + c.mask_row[token];
            const int64_t start = std::max<int64_t>({c.mask_start[token], s.first[r + i], key + low}), end = std::min(s.end[r + i], key + high);
            for (int64_t k = start; k < end; ++k)
                if (!keep[k]) logits[(k - key) * stride + i] = NONE;
        }
    }
};

// What W rows carry from block to block.
struct Carried {
    vec safe, sum;  // the largest logit, 0 where there is none, and the sum of weights

    // Takes the logits of a block in, divided by `scaling`, and gives what the rows' earlier results are
    // to be scaled by.
    Carried(const float* scores, int stride, int num, float* top, const float* sums, float* decay, float scaling = 1.0f) {
        const vec old = load(top), none = all(NONE);
        vec tops[4] = {none, none, none, none};  // so that they do not wait for each other
        int j = 0;
        for (; j + 4 <= num; j += 4)
            for (int i = 0; i < 4; ++i) tops[i] = higher(load(scores + int64_t(j + i) * stride), tops[i]);
        for (; j < num; ++j) tops[0] = higher(load(scores + int64_t(j) * stride), tops[0]);
        const vec most = higher(higher(higher(tops[0], tops[1]), higher(tops[2], tops[3])) * scaling, old);
        safe = most == NONE ? all(0.0f) : most;
        const vec factor = power(old - safe);
        sum = load(sums) * factor;
        store(top, most);
        store(decay, factor);
    }
};

// out[r] *= decay[r], where that changes anything.
static inline void scale_rows(float* out, int out_width, const float* decay, int num_rows) {
    for (int r = 0; r < num_rows; ++r) {
        if (decay[r] == 1.0f) continue;
        float* row = out + int64_t(r) * out_width;
        for (int d = 0; d < out_width; d += W) store(row + d, load(row + d) * decay[r]);
    }
}

// Turns logits of W rows, the r-th and those after it, into weights, after the cap and what rows do
// not see of the block's keys from low to high. PAIRS: into pairs[j / 2], the weights of keys j and
// j + 1 rounded to bfloat16, of which the last is 0 where their number is odd. low is even then.
template <bool PAIRS>
static inline void weigh(Scratch& s, const Seen& seen, float cap, float* logits, int64_t stride, int r, int key, int low, int high, int32_t* pairs = nullptr) {
    if (cap > 0)
        for (int j = low; j < high; ++j) store(logits + j * stride, capped(load(logits + j * stride), cap));
    seen.hide(logits, stride, r, key, low, high);
    Carried rows(logits + low * stride, stride, high - low, &s.top[r], &s.sum[r], &s.decay[r]);
    if constexpr (PAIRS) {
        const auto weight = [&](int j) { return rough_power(load(logits + j * stride) - rows.safe); };
        const auto keep = [&](int j, vec one, vec other) {
            rows.sum += one + other;
            *reinterpret_cast<loose_ints*>(pairs + j / 2 * stride) = rounded_pairs(one, other);
        };
        for (int j = low; j + 2 <= high; j += 2) keep(j, weight(j), weight(j + 1));
        if (high % 2) keep(high - 1, weight(high - 1), vec{});
    } else {
        for (int j = low; j < high; ++j) {
            const vec weights = power(load(logits + j * stride) - rows.safe);
            store(logits + j * stride, weights);
            rows.sum += weights;
        }
    }
    store(&s.sum[r], rows.sum);
}

// All rows of a block's logits [num][padded], and what the rows have so far.
static inline void weigh_all(const Step& step, Scratch& s, const Seen& seen, int padded, int num_rows, int key, int num) {
    for (int r = 0; r < padded; r += W) weigh<false>(s, seen, step.call.cap, s.scores.data() + r, padded, r, key, 0, num);
    scale_rows(s.out.data(), step.out_width, s.decay.data(), num_rows);
}

// Fetches rows of a block's keys. A CPU drops what it cannot fetch at once, so a few at a time.
template <Type T> static inline void fetch_rows(const Step& step, const Item& item, const int32_t* slots, int from, int to) {
    for (int j = from; j < to; ++j) {
        const char *key = step.key_row(slots[j], item.head), *value = step.value_row(slots[j], item.head);
        for (int at = 0; at < step.D * size_of(T); at += 64) prefetch(key + at);
        if (step.call.v) for (int at = 0; at < step.Dv * size_of(T); at += 64) prefetch(value + at);
    }
}

#if LANES == 16
// Q in bfloat16: pairs of values of 16 rows beside each other, [rows / 16][width / 2][16].
static inline void pack_queries(const Step& step, const Item& item, int width, Scratch& s) {
    const int height = step.height(item);
    s.narrow_q.assign(size_t(round_up(height, W)) * width * 2, 0);
    s.row.resize(size_t(W) * width / 2);
    int32_t* words = reinterpret_cast<int32_t*>(s.row.data());
    for (int r = 0; r < height; r += W) {
        for (int i = 0; i < W; ++i) {
            char* row = reinterpret_cast<char*>(words + i * width / 2);
            std::memset(row, 0, size_t(width) * 2);
            if (r + i < height) step.narrow_query(item, item.head, r + i, row);
        }
        int32_t* panel = reinterpret_cast<int32_t*>(s.narrow_q.data()) + int64_t(r) * width / 2;
        for (int d = 0; d < width / 2; d += W) {
            ivec block[W];
            for (int i = 0; i < W; ++i) block[i] = load_ints(words + i * width / 2 + d);
            turn(block);
            for (int i = 0; i < W; ++i) *reinterpret_cast<loose_ints*>(panel + (d + i) * W) = block[i];
        }
    }
}
#endif
