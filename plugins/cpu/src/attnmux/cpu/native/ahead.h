// Rows of a block of keys for few queries, and which lines are fetched while they are read.
#pragma once

#include "step.h"

constexpr int STREAM_KEYS = FETCHES_FAR ? 64 : 48;  // of a block
constexpr int DOT_KEYS = 8;      // read at a time, of K
constexpr int MIX_KEYS = 8;      // and of V
constexpr int MOST_KEYS = 16;    // of either
constexpr int AHEAD = FETCHES_FAR ? 16 : 8;  // keys between the one that is read and the one that is fetched
constexpr int MOST_AHEAD = FETCHES_FAR ? STREAM_KEYS : AHEAD;

// What is fetched while as many rows of one head are read: a run of bytes, or rows. Null: nothing.
struct Next {
    const char* run = nullptr;
    const char* const* rows = nullptr;
    int64_t at = 0;  // bytes from the beginning of each of the rows on

    Next from(int row, int64_t bytes) const { return {run ? run + row * bytes : nullptr, rows ? rows + row : nullptr, at}; }
};

// Fetches N lines where the d-th value of N rows begins a line.
template <Type T, int N> static inline void fetch(const Next& next, int d) {
    const int64_t at = int64_t(d) * size_of(T);
    if (at % 64 >= BLOCK * size_of(T)) return;
    if (next.run) for (int n = 0; n < N; ++n) prefetch(next.run + at / 64 * 64 * N + n * 64);
    else if (next.rows) for (int n = 0; n < N; ++n) prefetch(next.rows[n] + next.at + at);
}

// The same lines for a loop without branches: that of row n where its byte b is read is b * step after
// of[n]. Where nothing is fetched, it is one that is near.
template <int N> struct Lines {
    const char* of[N];
    int64_t step;

    Lines(const Next& next, const void* near) : step(next.run ? N : next.rows ? 1 : 0) {
        for (int n = 0; n < N; ++n) of[n] = next.run ? next.run + n * 64 : next.rows ? next.rows[n] + next.at : static_cast<const char*>(near);
    }
};

// Holds fetches back, so that one follows the other after 6 cycles or more. A loop with few products for
// each line runs ahead of memory, its fetches come in bursts, and the CPU drops those for which it has
// no room. `after` is 0, known as late as that.
template <bool HELD> struct Pace {
    int64_t after = 0;

    void wait() {
#if defined(__x86_64__)
        if constexpr (HELD)
            for (int i = 0; i < 2; ++i) asm volatile("imul $1, %0, %0" : "+r"(after) : : "cc");
#endif
    }
};

// Rows of a block of keys: where they lie, or copies with zeros behind them where their width is
// not what is loaded at a time.
template <Type T> struct Rows {
    const char* of[STREAM_KEYS + MOST_AHEAD + MOST_KEYS];
    int64_t head_bytes;
    bool in_order;  // most follow the one before

    // then: slots of the keys that are read after those that are left, so that they are fetched too. They
    // begin after the rows that are read as a multiple of MOST_KEYS, which must be the request's own.
    void find(const Step& step, bool values, const int32_t* slots, int left, int head, const int32_t* then = nullptr, int num_then = 0) {
        head_bytes = (values && step.call.v ? step.call.v_head : step.call.k_head) * size_of(T);
        const auto row = [&](int32_t slot) { return values ? step.value_row(slot, head) : step.key_row(slot, head); };
        constexpr int MOST = STREAM_KEYS + MOST_AHEAD;
        const int num = std::min(left, MOST), own = std::min(round_up(num, MOST_KEYS), MOST), known = std::min(own + num_then, MOST);
        int following = 0;
        for (int j = 0; j < num; ++j) {
            of[j] = row(slots[j]);
            following += j && slots[j] == slots[j - 1] + 1;
        }
        in_order = 2 * following > num;
        for (int j = num; j < own; ++j) of[j] = of[num - 1];
        for (int j = own; j < known; ++j) of[j] = row(then[j - own]);
        for (int j = known; j < MOST + MOST_KEYS; ++j) of[j] = of[known - 1];
    }
    void pad(int num, int num_heads, int n, Aligned<char>& copies) {
        const int64_t bytes = round_up(n, BLOCK) * size_of(T);
        num = round_up(num, DOT_KEYS);
        copies.assign(size_t(num * num_heads * bytes), 0);
        for (int j = 0; j < num; ++j) {
            char* copy = copies.data() + j * num_heads * bytes;
            for (int h = 0; h < num_heads; ++h) std::memcpy(copy + h * bytes, of[j] + h * head_bytes, size_t(n) * size_of(T));
            of[j] = copy;
        }
        head_bytes = bytes;
    }
};

// Goes ahead of the reading. Where rows follow each other it goes through them with all of their
// heads in the order of memory, whatever the order in which heads are read: a CPU drops what it
// cannot fetch at once, and fetches on its own what follows. It would do so in vain after a row that
// lies alone, and is no faster so where a byte has too few products to wait for. Rows with gaps, such
// as those of K with V beside it, take up to twice as long so.
template <Type T, int KEYS = AHEAD> struct Ahead {
    const Rows<T>& rows;
    int64_t bytes;  // of a row's part without gaps: one head, or all
    int num_parts, row = KEYS, part = 0;
    int64_t at = 0;
    bool in_order;

    Ahead(const Rows<T>& of, int n, int num_heads, int height) : rows(of), bytes(int64_t(n) * size_of(T)), num_parts(num_heads), in_order(of.in_order && height > size_of(T)) {
        if (bytes == rows.head_bytes) bytes *= num_heads, num_parts = 1;
        else in_order = false;
    }
    // Next to rows j to j + num of a head. A run may go on beyond a part.
    Next next(int j, int head, int num, int n) {
        if (n % BLOCK) return {};
        if (!in_order) return {nullptr, rows.of + j + KEYS, head * rows.head_bytes};
        const char* run = rows.of[row] + part * rows.head_bytes + at;
        for (at += int64_t(num) * n * size_of(T); at >= bytes; at -= bytes)
            if (++part == num_parts) part = 0, ++row;
        return {run};
    }
};
