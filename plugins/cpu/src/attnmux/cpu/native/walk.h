// Fetches rows of K and V line by line, in the order of memory, a few lines at a time,
// into the second cache.
#pragma once

#include "step.h"

struct Walk {
    struct Part {
        const char* first;
        int64_t bytes, run;  // from slot to slot, and how many of them are fetched
    };
    Part parts[2];
    int num_parts = 0, part = 0;
    const int32_t *slots = nullptr, *end = nullptr;
    const char *at = nullptr, *stop = nullptr;

    // The rows of an item's heads. Those whose heads do not lie beside each other are not fetched.
    Walk(const Step& step, const Item& item) {
        const Call& c = step.call;
        const int64_t size = size_of(step.kv_type), before = item.head_end - item.head - 1;
        const auto run = [&](int64_t head, int n) { return (before * head + n) * size; };
        Part key = {step.key_row(0, item.head), c.k_slot * size, run(c.k_head, step.D)};
        const Part value = {step.value_row(0, item.head), c.v_slot * size, run(c.v_head, step.Dv)};
        const int64_t on = value.first - key.first;
        const bool beside = c.v && value.bytes == key.bytes && on >= 0 && on < c.k_head * size;
        if (beside) key.run = std::max(key.run, on + value.run);
        if (key.run <= key.bytes) parts[num_parts++] = key;
        if (c.v && !beside && value.run <= value.bytes) parts[num_parts++] = value;
    }
    int64_t lines() const {
        int64_t bytes = 0;
        for (int i = 0; i < num_parts; ++i) bytes += parts[i].run;
        return bytes / 64;
    }
    // From here on rows of these slots are fetched.
    void begin(const int32_t* from, int num) {
        slots = from, end = from + std::max(num, 0), part = 0;
        if (!num_parts) end = slots;
    }
    void fetch(int num) {
        for (int i = 0; i < num; ++i, at += 64) {
            if (at >= stop) {
                if (slots == end) return;
                at = parts[part].first + *slots * parts[part].bytes, stop = at + parts[part].run;
                part ^= num_parts - 1, slots += !part;  // a branch costs 5 % of decoding
            }
            __builtin_prefetch(at, 0, 2);
        }
        asm volatile("");  // as in `prefetch`
    }
};
