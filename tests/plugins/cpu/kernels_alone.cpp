// The kernels of `native` without Python and torch: random steps and products against double.
// Exits with 1 and a line for each that is wrong.
#include "attend.cpp"

#include <cstdio>
#include <random>

static std::mt19937 rng(7);

static int pick(int low, int high) { return low + int(rng() % (high - low + 1)); }

struct Format { int exponent, mantissa; };
static const Format FORMATS[] = {{8, 23}, {8, 7}, {5, 10}, {4, 3}, {5, 2}};  // as Type

static double value_of(Type type, const char* p) {
    const auto [exponent, mantissa] = FORMATS[type];
    const int bias = (1 << (exponent - 1)) - 1;
    uint32_t bits = 0;
    std::memcpy(&bits, p, size_of(type));
    const int e = bits >> mantissa & ((1 << exponent) - 1);
    const double m = std::ldexp(double(bits & ((1u << mantissa) - 1)), -mantissa);
    const double size = e ? std::ldexp(1 + m, e - bias) : std::ldexp(m, 1 - bias);
    return bits >> (exponent + mantissa) & 1 ? -size : size;
}

// n values of sizes from 1/8 to 2.
struct Values {
    Type type;
    std::vector<char> bytes;
    Values(Type type, size_t n) : type(type), bytes(n * size_of(type)) {
        const auto [exponent, mantissa] = FORMATS[type];
        for (size_t i = 0; i < n; ++i) {
            const uint32_t e = (1 << (exponent - 1)) - 1 - pick(0, 3), m = rng() & ((1u << mantissa) - 1);
            const uint32_t bits = uint32_t(rng() & 1) << (exponent + mantissa) | e << mantissa | m;
            std::memcpy(bytes.data() + i * size_of(type), &bits, size_of(type));
        }
    }
    std::vector<double> wide() const {
        std::vector<double> values;
        for (size_t i = 0; i < bytes.size(); i += size_of(type)) values.push_back(value_of(type, bytes.data() + i));
        return values;
    }
};

static int32_t serially(int64_t begin, int64_t end, int64_t, Body body, void* context) {
    body(begin, end, context);
    return 0;
}

static double rounding(Type type) { return type == F32 ? 1e-5 : type == BF16 ? 1.0 / 128 : 1.0 / 1024; }

static bool is_near(Type type, double got, double expected, double size) {
    return std::fabs(got - expected) <= rounding(type) * std::fabs(expected) + 1e-5 * size;
}

static int attention(Type q_type, Type kv_type, int D, int Dv, int num_threads) {
    const int heads = 6, kv_heads = 2;
    const std::vector<int32_t> lens = {133, 50, 4}, news = {1, 20, 3};
    std::vector<int32_t> qo = {0}, spans = {0}, starts(3, 0), slots;
    std::vector<int64_t> first, end;
    for (int b = 0; b < 3; ++b) {
        for (int t = 0; t < news[b]; ++t) end.push_back(lens[b] - news[b] + t + 1), first.push_back(std::max<int64_t>(0, end.back() - 100));
        qo.push_back(qo.back() + news[b]), spans.push_back(spans.back() + lens[b]);
    }
    for (int i = 0; i < spans.back(); ++i) slots.push_back(i);
    std::shuffle(slots.begin(), slots.end(), rng);
    const int tokens = qo.back(), rows = spans.back();
    Values q(q_type, size_t(tokens) * heads * D), k(kv_type, size_t(rows) * kv_heads * D), v(kv_type, size_t(rows) * kv_heads * Dv), out(q_type, size_t(tokens) * heads * Dv);
    Call c = {};
    c.qo_indptr = qo.data(), c.span_indptr = spans.data(), c.span_start = starts.data(), c.slots = slots.data();
    c.first = first.data(), c.end = end.data(), c.num_requests = 3;
    c.q = q.bytes.data(), c.k = k.bytes.data(), c.v = v.bytes.data(), c.out = out.bytes.data();
    c.q_token = heads * D, c.q_head = D, c.k_slot = kv_heads * D, c.k_head = D, c.v_slot = kv_heads * Dv, c.v_head = Dv, c.out_token = heads * Dv, c.out_head = Dv;
    c.num_tokens = tokens, c.num_heads = heads, c.num_kv_heads = kv_heads, c.D = D, c.Dv = Dv, c.q_type = q_type, c.kv_type = kv_type;
    c.scaling = 0.125f, c.v_scale = 1, c.num_threads = num_threads;
    if (attend(&c, serially)) return 1;
    const auto queries = q.wide(), keys = k.wide(), values = v.wide(), results = out.wide();
    for (int b = 0; b < 3; ++b)
        for (int t = qo[b]; t < qo[b + 1]; ++t)
            for (int h = 0; h < heads; ++h) {
                std::vector<double> sums(Dv, 0.0);
                double total = 0;
                for (int64_t j = first[t]; j < end[t]; ++j) {
                    const size_t row = size_t(slots[spans[b] + j]) * kv_heads + h / (heads / kv_heads);
                    double logit = 0;
                    for (int d = 0; d < D; ++d) logit += queries[(size_t(t) * heads + h) * D + d] * keys[row * D + d];
                    const double weight = std::exp(logit * 0.125);
                    total += weight;
                    for (int d = 0; d < Dv; ++d) sums[d] += weight * values[row * Dv + d];
                }
                for (int d = 0; d < Dv; ++d) {
                    const double got = results[(size_t(t) * heads + h) * Dv + d], expected = sums[d] / total;
                    if (is_near(q_type, got, expected, 2)) continue;
                    std::printf("attention of types %d and %d, D %d, token %d, head %d: got %g, expected %g\n", q_type, kv_type, D, t, h, got, expected);
                    return 1;
                }
            }
    return 0;
}

static int product(Type type, int num_rows, int width, int num_out) {
    Values x(type, size_t(num_rows) * width), weight(type, size_t(num_out) * width), bias(type, num_out), out(type, size_t(num_rows) * num_out);
    const Linear c = {x.bytes.data(), weight.bytes.data(), bias.bytes.data(), out.bytes.data(), width, width, num_out, num_rows, width, num_out, type, 2};
    if (linear(&c, serially)) return 1;
    const auto rows = x.wide(), weights = weight.wide(), biases = bias.wide(), results = out.wide();
    for (int r = 0; r < num_rows; ++r)
        for (int n = 0; n < num_out; ++n) {
            double expected = biases[n];
            for (int d = 0; d < width; ++d) expected += rows[size_t(r) * width + d] * weights[size_t(n) * width + d];
            const double got = results[size_t(r) * num_out + n];
            if (is_near(type, got, expected, width)) continue;
            std::printf("product of type %d, %d x %d x %d: got %g, expected %g\n", type, num_rows, width, num_out, got, expected);
            return 1;
        }
    return 0;
}

int main() {
    int wrong = 0;
    for (Type type : {F32, BF16, F16}) {
        wrong += attention(type, type, 64, 64, 1) + attention(type, type, 72, 40, 4);
        wrong += attention(type, E4M3, 64, 64, 4) + attention(type, E5M2, 64, 48, 1);
        for (int rows : {1, 3, 8, 9, 70}) wrong += product(type, rows, 32 * pick(1, 10), pick(1, 120));
    }
    return wrong != 0;
}
