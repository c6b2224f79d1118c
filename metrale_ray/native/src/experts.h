// SPDX-License-Identifier: MIT OR Apache-2.0
// A layer's experts of one rank: gate and up with the activation, then down, each expert's weights read once for all its
// tokens.
//
// `counts` [all experts] or null: how often each was chosen is added to it. `chosen` null: one mlp, for all tokens.
//
// Rules. A token's sum is over its experts in the order of their numbers, whatever else is in the step. Threads share
// first the inner dimension and then the outputs, so no two write the same place and no order depends on their number.

#pragma once

#include "linear.h"

namespace MR_ISA {

// The (token, expert) pairs of the local experts, sorted by expert and, within one, by token.
struct Pairs {
    int* first;         // [count + 1]: where each expert's pairs begin
    int* tokens;        // [pairs]
    float* weights;     // [pairs]
    int* used;          // experts that have pairs
    int num_used;

    static size_t bytes(int count, int pairs) {
        return 2 * Scratch::bytes_of<int>(count + 1) + Scratch::bytes_of<int>(pairs) + Scratch::bytes_of<float>(pairs);
    }
    Pairs(Scratch& memory, int count, int pairs)
        : first(memory.take<int>(count + 1)),
          tokens(memory.take<int>(pairs)),
          weights(memory.take<float>(pairs)),
          used(memory.take<int>(count + 1)),
          num_used(0) {}

    void sort(const int32_t* chosen, const float* chosen_weights, int rows, int per_token, int first_expert, int count) {
        for (int e = 0; e <= count; e++) first[e] = 0;
        const int all = rows * per_token;
        auto local = [&](int pair) { return chosen == nullptr ? 0 : chosen[pair] - first_expert; };
        for (int pair = 0; pair < all; pair++)
            if (local(pair) >= 0 && local(pair) < count) first[local(pair) + 1]++;
        for (int e = 0; e < count; e++) {
            if (first[e + 1] > 0) used[num_used++] = e;
            first[e + 1] += first[e];
        }
        for (int pair = 0; pair < all; pair++) {
            int e = local(pair);
            if (e < 0 || e >= count) continue;
            tokens[first[e]] = pair / per_token;
            weights[first[e]++] = chosen_weights == nullptr ? 1.0f : chosen_weights[pair];
        }
        for (int e = count; e > 0; e--) first[e] = first[e - 1];
        first[0] = 0;
    }
};

template <class F> class ExpertsStep {
  public:
    typedef typename F::Item Item;

    ExpertsStep(const Experts& experts, const Rows& x, const Rows& out, int per_token, bool add)
        : experts_(experts), x_(x), out_(out), add_(add),
          inner_blocks_(num_blocks(experts.inner)), hidden_blocks_(num_blocks(experts.hidden)),
          inner_width_(inner_blocks_ * BLOCK), hidden_width_(hidden_blocks_ * BLOCK),
          memory_(prepared(experts, x, per_token)),
          wide_(memory_, x.count, experts.hidden),
          pairs_(memory_, experts.count, x.count * per_token),
          inner_(memory_.take<float>(size_t(x.count) * per_token * inner_width_)),
          sums_(memory_.take<float>(size_t(x.count) * hidden_width_)),
          starts_(memory_.take<const float*>(size_t(x.count) * per_token)) {}

    void run(const int32_t* chosen, const float* weights, int per_token, int64_t* counts, int threads) {
        for (int64_t pair = 0; counts != nullptr && pair < int64_t(x_.count) * per_token; pair++) counts[chosen[pair]]++;
        pairs_.sort(chosen, weights, x_.count, per_token, experts_.first, experts_.count);
        parallel(threads, [&](Team& team) {
            int64_t from, to;
            team.share(x_.count, from, to);
            wide_.fill(x_, experts_.hidden, from, to);
            team.barrier();
            up(team);
            team.barrier();
            down(team);
        });
    }

  private:
    static Scratch& prepared(const Experts& experts, const Rows& x, int per_token) {
        Scratch& memory = scratch();
        const size_t pairs = size_t(x.count) * per_token;
        memory.reset(WideRows<F>::bytes(x.count, experts.hidden) + Pairs::bytes(experts.count, int(pairs)) +
                     Scratch::bytes_of<float>(pairs * num_blocks(experts.inner) * BLOCK) +
                     Scratch::bytes_of<float>(size_t(x.count) * num_blocks(experts.hidden) * BLOCK) +
                     Scratch::bytes_of<const float*>(pairs));
        return memory;
    }

    // This thread's share of the (expert, block of the inner dimension) units, an expert with many tokens counting more.
    void up(Team& team) {
        int64_t total = 0;
        for (int u = 0; u < pairs_.num_used; u++) total += cost(pairs_.used[u]) * inner_blocks_;
        const int64_t mine_from = total * team.index / team.size, mine_to = total * (team.index + 1) / team.size;
        int64_t before = 0;
        for (int u = 0; u < pairs_.num_used; u++) {
            const int expert = pairs_.used[u];
            const int64_t each = cost(expert);
            int from = clamp((mine_from - before + each - 1) / each), to = clamp((mine_to - before + each - 1) / each);
            if (from < to) up_of(expert, from, to);
            before += each * inner_blocks_;
        }
    }
    int clamp(int64_t block) const { return int(block < 0 ? 0 : block > inner_blocks_ ? inner_blocks_ : block); }
    // Reading the weights, and computing: about so many rows are computed in the time of one reading.
    int64_t cost(int expert) const { return 4 + pairs_.first[expert + 1] - pairs_.first[expert]; }

    void up_of(int expert, int from, int to) {
        const size_t stride = block_items<F>(experts_.hidden);
        const Item* gate = static_cast<const Item*>(experts_.gate_up) + (size_t(expert) * 2 * inner_blocks_ + from) * stride;
        const Item* up = gate + size_t(inner_blocks_) * stride;
        const float* scales = experts_.gate_up_scales;
        if (scales != nullptr) scales += size_t(expert) * 2 * inner_width_;
        const int first = pairs_.first[expert], last = pairs_.first[expert + 1];
        const float* rows[PANEL_ROWS];
        for (int begin = first; begin < last; begin += PANEL_ROWS) {
            const int count = last - begin < PANEL_ROWS ? last - begin : PANEL_ROWS;
            for (int r = 0; r < count; r++) rows[r] = wide_.starts[pairs_.tokens[begin + r]];
            product<F>(rows, count, gate, to - from, experts_.hidden, [&](int r, int b, const f32v(&sums)[NV]) {
                float* at = inner_ + size_t(begin + r) * inner_width_ + (from + b) * BLOCK;
                for (int v = 0; v < NV; v++) {
                    f32v value = scales == nullptr ? sums[v] : sums[v] * scales_at<F>(scales + (from + b) * BLOCK + v * W);
                    store(at + v * W, activate(value, experts_.activation));
                }
            });
            product<F>(rows, count, up, to - from, experts_.hidden, [&](int r, int b, const f32v(&sums)[NV]) {
                float* at = inner_ + size_t(begin + r) * inner_width_ + (from + b) * BLOCK;
                for (int v = 0; v < NV; v++) {
                    const float* at_scale = scales + inner_width_ + (from + b) * BLOCK + v * W;
                    f32v value = scales == nullptr ? sums[v] : sums[v] * scales_at<F>(at_scale);
                    store(at + v * W, load(at + v * W) * value);
                }
            });
        }
        // One place for each row of a later product: they all lie in `inner_`.
        if (from == 0)
            for (int pair = first; pair < last; pair++) starts_[pair] = inner_ + size_t(pair) * inner_width_;
    }

    void down(Team& team) {
        int64_t from, to;
        team.share(hidden_blocks_, from, to);
        const int blocks = int(to - from), begin_output = int(from) * BLOCK;
        if (blocks == 0) return;
        for (int row = 0; row < x_.count; row++)
            std::memset(sums_ + size_t(row) * hidden_width_ + begin_output, 0, size_t(blocks) * BLOCK * sizeof(float));
        for (int u = 0; u < pairs_.num_used; u++) down_of(pairs_.used[u], int(from), blocks);
        for (int row = 0; row < x_.count; row++)
            for (int b = 0; b < blocks; b++) {
                f32v values[NV];
                const float* at = sums_ + size_t(row) * hidden_width_ + begin_output + b * BLOCK;
                for (int v = 0; v < NV; v++) values[v] = load(at + v * W);
                put_block(row_at(out_, row), out_.format, begin_output + b * BLOCK, experts_.hidden, values, add_);
            }
    }

    void down_of(int expert, int from, int blocks) {
        const Item* w = static_cast<const Item*>(experts_.down) +
                        (size_t(expert) * hidden_blocks_ + from) * block_items<F>(experts_.inner);
        const float* scales = experts_.down_scales;
        if (scales != nullptr) scales += size_t(expert) * hidden_width_;
        const int first = pairs_.first[expert], last = pairs_.first[expert + 1];
        for (int begin = first; begin < last; begin += PANEL_ROWS) {
            const int count = last - begin < PANEL_ROWS ? last - begin : PANEL_ROWS;
            product<F>(starts_ + begin, count, w, blocks, experts_.inner, [&](int r, int b, const f32v(&sums)[NV]) {
                const int pair = begin + r, output = (from + b) * BLOCK;
                float* at = sums_ + size_t(pairs_.tokens[pair]) * hidden_width_ + output;
                const f32v weight = splat(pairs_.weights[pair]);
                for (int v = 0; v < NV; v++) {
                    f32v value = scales == nullptr ? sums[v] : sums[v] * scales_at<F>(scales + output + v * W);
                    store(at + v * W, load(at + v * W) + weight * value);
                }
            });
        }
    }

    const Experts& experts_;
    const Rows &x_, &out_;
    const bool add_;
    const int inner_blocks_, hidden_blocks_, inner_width_, hidden_width_;
    Scratch& memory_;
    WideRows<F> wide_;
    Pairs pairs_;
    float *inner_, *sums_;
    const float** starts_;
};

inline void experts(const Experts* experts, const Rows* x, const int32_t* chosen, const float* weights, int32_t per_token,
                    const Rows* out, int32_t add, int64_t* counts, int32_t threads) {
    switch (experts->format) {
        case FP32: return ExpertsStep<Fp32>(*experts, *x, *out, per_token, add).run(chosen, weights, per_token, counts, threads);
        case BF16: return ExpertsStep<Bf16>(*experts, *x, *out, per_token, add).run(chosen, weights, per_token, counts, threads);
        case INT8: return ExpertsStep<Int8>(*experts, *x, *out, per_token, add).run(chosen, weights, per_token, counts, threads);
    }
}

}  // namespace MR_ISA
