// Attention over a KV cache of plain rows, for CPUs. No headers of torch or Python are needed.
//
// plan.h cuts a step into items for the threads; stream.h, few.h, few_tiles.h, panels.h, pairs.h and
// tiles.h are six ways to do one. Ranges of keys of the same queries are merged by their logarithms of sums in a second pass.

#include <new>

#include "few.h"
#include "few_tiles.h"
#include "linear_pairs.h"
#include "pairs.h"
#include "panels.h"
#include "plan.h"
#include "rows.h"
#include "stream.h"
#include "tiles.h"

static void run_items(int64_t, int64_t, void* context) {
    Step& step = *static_cast<Step*>(context);
    thread_local Scratch scratch;  // to allocate it takes 1 us of a call's 10
    for (int64_t at; (at = step.next.fetch_add(1)) < int64_t(step.items.size());) {
        const Item& item = step.items[at];
        if (item.kernel == Kernel::FEW) few(step, item, scratch);
        else if (item.kernel == Kernel::FEW_TILES) few_tiles(step, item, scratch);
        else if (item.kernel == Kernel::STREAM) stream(step, item, scratch);
        else if (item.kernel == Kernel::PANELS) panels(step, item, scratch);
        else if (item.kernel == Kernel::PAIRS) pairs(step, item, scratch);
        else tiles(step, item, scratch);
    }
}

static void merge_splits(int64_t begin, int64_t end, void* context) {
    const Step& step = *static_cast<Step*>(context);
    for (int64_t at = begin; at < end; ++at) merge(step, step.splits[at]);
}

// Returns 0; 1 where memory is short. `parallel_for` is torch's, which runs on torch's threads.
extern "C" int attend(const Call* call, ParallelFor parallel_for) {
    static const bool granted = HAS_TILES && ask_for_tiles();
    try {
        Step step(*call, granted);
        cut(step);
        const int64_t num_items = int64_t(step.items.size());
        parallel_for(0, std::min<int64_t>(call->num_threads, num_items), 1, run_items, &step);
        if (!step.splits.empty()) parallel_for(0, int64_t(step.splits.size()), 1, merge_splits, &step);
        const std::vector<float> none(step.Dv, 0.0f);
        for (int t = call->qo_indptr[call->num_requests]; t < call->num_tokens; ++t)
            for (int h = 0; h < call->num_heads; ++h) write(step, t, h, none.data(), NONE, 0.0f);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
