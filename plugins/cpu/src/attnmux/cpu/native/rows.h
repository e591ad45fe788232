// What a step and a layer need besides attention: rows of K and V written to their slots, and the
// ranges and slots of a step's keys.
#pragma once

#include "step.h"

extern "C" {

// Rows of one buffer. Strides are in bytes.
struct Copied {
    const void* from;
    void* to;
    int64_t from_token, from_head, to_slot, to_head, num_heads, head_bytes;
};

struct Written {
    const int64_t* loc;
    int64_t num_tokens, num_slots;
    int32_t num_threads;
    Copied first, second;
};

// A step whose queries see ranges of keys. `slots` has room for `room` of them, the other results for
// B + 1 or T values.
struct Layout {
    const int32_t *new_lens, *cached, *encoder;  // [B]
    const int64_t* rows;                         // [B] of the table
    const int32_t* table;                        // slots, or pages of `page` tokens
    int64_t num_rows, num_columns, page;
    int64_t num_requests, num_tokens, room;
    int64_t window, chunk;                       // window < 0, chunk 0: none
    int32_t is_causal;
    int32_t *qo_indptr, *span_indptr, *span_start, *slots;
    int64_t *first, *end;
};
}

static inline void write_tokens(int64_t begin, int64_t end, void* context) {
    const Written& call = *static_cast<const Written*>(context);
    for (const Copied* part : {&call.first, &call.second})
        for (int64_t t = begin; t < end; ++t) {
            const char* from = static_cast<const char*>(part->from) + t * part->from_token;
            char* to = static_cast<char*>(part->to) + call.loc[t] * part->to_slot;
            for (int64_t h = 0; h < part->num_heads; ++h) std::memcpy(to + h * part->to_head, from + h * part->from_head, size_t(part->head_bytes));
        }
}

// Returns 0; 1, before anything is written, for a slot that is none.
extern "C" int write_rows(const Written* call, ParallelFor parallel_for) {
    constexpr int64_t GRAIN = 256;  // tokens
    for (int64_t t = 0; t < call->num_tokens; ++t)
        if (call->loc[t] < 0 || call->loc[t] >= call->num_slots) return 1;
    if (call->num_tokens <= GRAIN || call->num_threads == 1) write_tokens(0, call->num_tokens, const_cast<Written*>(call));
    else parallel_for(0, call->num_tokens, GRAIN, write_tokens, const_cast<Written*>(call));
    return 0;
}

static inline void lay_tokens(const Layout& c, int b, int64_t at) {
    const int64_t cached = c.cached[b], num_keys = cached + c.new_lens[b];
    for (int64_t i = 0; i < c.new_lens[b]; ++i) {
        const int64_t place = cached + i;
        int64_t first = c.window >= 0 ? std::max<int64_t>(place - c.window, 0) : 0, end = c.is_causal ? std::min(num_keys, place + 1) : num_keys;
        if (c.chunk > 0) {
            const int64_t chunk = place / c.chunk * c.chunk;
            first = std::max(first, chunk), end = std::min(end, chunk + c.chunk);
        }
        c.first[at + i] = first, c.end[at + i] = end;
    }
}

// Returns the number of slots, which are written if there is room for them; -1 for more tokens than
// num_tokens and for keys that the table does not have.
extern "C" int64_t lay_out(const Layout* call) {
    const Layout& c = *call;
    int64_t tokens = 0, total = 0;
    c.qo_indptr[0] = c.span_indptr[0] = 0;
    for (int b = 0; b < c.num_requests; ++b) {
        const int64_t num = c.new_lens[b], at = tokens;
        if (num < 0 || (tokens += num) > c.num_tokens || c.rows[b] < 0 || c.rows[b] >= c.num_rows) return -1;
        lay_tokens(c, b, at);
        const int64_t start = num ? c.first[at] : 0, keys = num ? std::max<int64_t>(c.end[tokens - 1] - start, 0) : 0;
        const int64_t column = start + c.encoder[b];
        if (column < 0 || column + keys > c.num_columns * c.page) return -1;
        if (total + keys <= c.room) {
            const int32_t* row = c.table + c.rows[b] * c.num_columns;
            int32_t* slots = c.slots + total;
            for (int64_t j = 0; j < keys;) {
                const int64_t in_page = (column + j) % c.page, stop = std::min(keys, j + c.page - in_page);
                const int32_t slot = row[(column + j) / c.page] * int32_t(c.page) + int32_t(in_page);
                for (int64_t i = j; i < stop; ++i) slots[i] = slot + int32_t(i - j);
                j = stop;
            }
        }
        total += keys;
        c.qo_indptr[b + 1] = int32_t(tokens), c.span_start[b] = int32_t(start), c.span_indptr[b + 1] = int32_t(total);
    }
    return total;
}
