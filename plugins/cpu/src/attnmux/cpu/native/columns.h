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
    // Removes what rows do not see of a block of keys. scores: [num][padded].
    void hide(float* scores, int padded, int key, int num) const {
        if (whole(key, num)) return;
        const Call& c = step.call;
        for (int j = 0; j < num; ++j)
            for (int r = 0; r < padded; r += W) {
                const int place = key + j;
                ivec keep = (load_ints(&s.first[r]) <= place) & (load_ints(&s.end[r]) > place);
                if (c.hidden_from) keep &= (load_ints(&s.hidden_from[r]) > place) | (load_ints(&s.hidden_to[r]) <= place);
                float* at = scores + int64_t(j) * padded + r;
                store(at, keep ? load(at) : all(NONE));
            }
        if (!c.mask) return;
        for (int r = 0; r < num_rows; ++r) {
            const int token = token_of(r);
            const uint8_t* keep = c.mask + c.mask_row[token];
            const int64_t start = std::max<int64_t>({c.mask_start[token], s.first[r], key}), end = std::min(s.end[r], key + num);
            for (int64_t k = start; k < end; ++k)
                if (!keep[k]) scores[(k - key) * padded + r] = NONE;
        }
    }
};

// What W rows carry from block to block.
struct Carried {
    vec safe, sum;  // the largest logit, 0 where there is none, and the sum of weights

    // Takes the logits of a block in, and gives what the rows' earlier results are to be scaled by.
    Carried(const float* scores, int stride, int num, float* top, const float* sums, float* decay) {
        const vec old = load(top);
        vec most = old;
        for (int j = 0; j < num; ++j) most = higher(load(scores + int64_t(j) * stride), most);
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

// Turns a block's logits [num][padded] into weights, after the cap and what rows do not see, and
// scales what the rows have so far.
static inline void weigh_columns(Scratch& s, const Seen& seen, float cap, int padded, int num_rows, int out_width, int key, int num) {
    float* scores = s.scores.data();
    if (cap > 0)
        for (int at = 0; at < num * padded; at += W) store(scores + at, capped(load(scores + at), cap));
    seen.hide(scores, padded, key, num);
    for (int r = 0; r < padded; r += W) {
        Carried rows(scores + r, padded, num, &s.top[r], &s.sum[r], &s.decay[r]);
        for (int j = 0; j < num; ++j) {
            const vec weights = power(load(scores + j * padded + r) - rows.safe);
            store(scores + j * padded + r, weights);
            rows.sum += weights;
        }
        store(&s.sum[r], rows.sum);
    }
    scale_rows(s.out.data(), out_width, s.decay.data(), num_rows);
}

static inline void scale_scores(Scratch& s, float scaling, int num) {
    for (int at = 0; at < num; at += W) store(s.scores.data() + at, load(s.scores.data() + at) * scaling);
}

// pairs[j / 2][r]: the weights of keys j and j + 1, rounded to bfloat16; 0 behind the last.
static inline void pair_weights(Scratch& s, int padded, int num) {
    for (int j = 0; j < num; j += 2)
        for (int r = 0; r < padded; r += W) {
            const ivec one = (ivec)load(s.scores.data() + int64_t(j) * padded + r) + 0x8000;
            const ivec other = j + 1 < num ? (ivec)load(s.scores.data() + int64_t(j + 1) * padded + r) + 0x8000 : ivec{};
            *reinterpret_cast<loose_ints*>(s.pairs.data() + int64_t(j / 2) * padded + r) = (one >> 16 & 0xffff) | (other & int32_t(0xffff0000));
        }
}
