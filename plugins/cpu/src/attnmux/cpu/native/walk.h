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
    int num_parts = 0, part = 0, left = 0;  // lines of a run
    const int32_t *slots = nullptr, *end = nullptr;
    const char* at = nullptr;

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
    // From here on rows of these slots are fetched: as one run, if they follow each other without gaps.
    void begin(const int32_t* from, int num) {
        slots = from, end = num_parts ? from + std::max(num, 0) : from, part = left = 0;
        if (slots == end || num_parts > 1 || parts[0].run < parts[0].bytes || end[-1] - from[0] != num - 1) return;
        at = parts[0].first + from[0] * parts[0].bytes, left = int(num * parts[0].bytes / 64), slots = end;
    }
    void fetch(int num) {
        while (num > left) {
            for (int i = 0; i < left; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
            num -= left, left = 0;
            if (slots == end) return;
            at = parts[part].first + *slots * parts[part].bytes, left = int(parts[part].run / 64);
            part ^= num_parts - 1, slots += !part;
        }
        for (int i = 0; i < num; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
        at += 64 * num, left -= num;
        asm volatile("");  // as in `prefetch`
    }
};
