// SPDX-License-Identifier: MIT OR Apache-2.0
// Attention over the paged cache, without gathering: for decode rows and for prompt chunks, any group of query heads to
// a kv head, with or without a sliding window.
//
// The cache of one layer is [blocks][2: keys, values][kv heads] of packed sub-blocks of 16 positions (see product.h):
// keys as weights of 16 outputs (positions) and head_dim inputs, values as weights of head_dim outputs and 16 inputs
// (positions). So scores and sums are products like all others, and each key and value is read once for a whole group.
//
// Rules. Positions are cut in ways that do not depend on the number of threads or spans: none for prompt chunks, parts of
// PART positions for single tokens, whose parts are joined in order. So a row's bits are the same beside any others.
// Positions that a row does not see are never used, whatever they hold.

#pragma once

#include "parallel.h"
#include "product.h"
#include "rows.h"
#include "scratch.h"

namespace MR_ISA {

constexpr int SUB = BLOCK;           // positions of a sub-block
constexpr int CHUNK_SUBS = 8;        // sub-blocks whose scores are held at once
constexpr int CHUNK = CHUNK_SUBS * SUB;
constexpr int PART = 512;            // positions of a unit of a single token
constexpr int UNIT_ROWS = MAX_GROUP; // query rows of a unit: tokens times query heads
constexpr int ASKED_LINES = 8;       // of what is read next

template <class F> struct CacheLayout {
    int head_dim, padded_dim, block_size, kv_heads;
    size_t sub_items, head_items, block_items_all;
    const typename F::Item* items;

    explicit CacheLayout(const Cache& cache)
        : head_dim(cache.head_dim), padded_dim((cache.head_dim + BLOCK - 1) / BLOCK * BLOCK), block_size(cache.block_size),
          kv_heads(cache.kv_heads), sub_items(size_t(padded_dim) * SUB), head_items(sub_items * (block_size / SUB)),
          block_items_all(head_items * 2 * kv_heads), items(static_cast<const typename F::Item*>(cache.items)) {}
    // The sub-block that holds `position`.
    const typename F::Item* sub(const int32_t* blocks, int position, int which, int head) const {
        return items + size_t(blocks[position / block_size]) * block_items_all + (size_t(which) * kv_heads + head) * head_items +
               size_t(position % block_size / SUB) * sub_items;
    }
};

template <class F> MR_INLINE void store_item(typename F::Item* to, float value) {
    if constexpr (F::STEP == 2) *to = f32_to_bf16(value);
    else *to = value;
}

// A token's keys and values into its place.
template <class F> void store_token(const CacheLayout<F>& layout, const int32_t* blocks, int position, const char* row, int32_t format, int heads) {
    const int lane = position % SUB, dim = layout.head_dim;
    for (int head = 0; head < layout.kv_heads; head++) {
        auto* keys = const_cast<typename F::Item*>(layout.sub(blocks, position, 0, head));
        auto* values = const_cast<typename F::Item*>(layout.sub(blocks, position, 1, head));
        const int64_t key = int64_t(heads + head) * dim, value = int64_t(heads + layout.kv_heads + head) * dim;
        for (int d = 0; d < dim; d++) {
            store_item<F>(keys + (size_t(d / F::STEP) * BLOCK + lane) * F::STEP + d % F::STEP, item_at(row, format, key + d));
            store_item<F>(values + size_t(d / BLOCK) * SUB * BLOCK + (size_t(lane / F::STEP) * BLOCK + d % BLOCK) * F::STEP + lane % F::STEP,
                          item_at(row, format, value + d));
        }
    }
}

template <class F> void store_kv_of(const Cache& cache, const Spans& spans, const Rows& qkv, int heads, int threads) {
    const CacheLayout<F> layout(cache);
    parallel(threads < spans.count ? threads : spans.count, [&](Team& team) {
        int64_t from, to;
        team.share(spans.first_row[spans.count], from, to);
        for (int s = 0; s < spans.count; s++)
            for (int row = spans.first_row[s]; row < spans.first_row[s + 1]; row++)
                if (row >= from && row < to)
                    store_token<F>(layout, spans.blocks + spans.first_block[s], spans.start[s] + row - spans.first_row[s],
                                   row_at(qkv, row), qkv.format, heads);
    });
}

// 0, or 1 when a table names a block that the cache has not: then nothing is written.
inline int32_t store_kv(const Cache* cache, const Spans* spans, const Rows* qkv, int32_t heads, int32_t threads) {
    for (int i = 0; i < spans->num_blocks; i++)
        if (uint32_t(spans->blocks[i]) >= uint32_t(cache->num_blocks)) return 1;
    if (cache->format == BF16) store_kv_of<Bf16>(*cache, *spans, *qkv, heads, threads);
    else store_kv_of<Fp32>(*cache, *spans, *qkv, heads, threads);
    return 0;
}

// sums[M][NV] += weights [M][positions from..to) times one 16-wide block of values.
template <class F, int M>
MR_INLINE void add_values(const float* const* weights, const typename F::Item* values, int from, int to, f32v (&sums)[M][NV]) {
    for (int k = from / F::STEP * F::STEP; k < to; k += F::STEP) {
        f32v wide[F::STEP][NV];
        F::template widen<0>(values + size_t(k) * BLOCK, wide[0]);
        if constexpr (F::STEP == 2) F::template widen<1>(values + size_t(k) * BLOCK, wide[1]);
        for (int s = 0; s < F::STEP; s++) {
            if (k + s < from || k + s >= to) continue;
            for (int m = 0; m < M; m++)
                for (int v = 0; v < NV; v++) sums[m][v] += weights[m][k + s] * wide[s][v];
        }
    }
}

// The rows of one unit: queries, and what has been summed of their values so far.
template <class F> class AttentionUnit {
  public:
    // `rows` rows for each of `heads` kv heads from `head` on, one head's after another's.
    AttentionUnit(const CacheLayout<F>& layout, const int32_t* blocks, int head, int heads, int rows)
        : layout_(layout), blocks_(blocks), head_(head), heads_(heads), head_rows_(rows), rows_(rows * heads) {
        for (int r = 0; r < rows_; r++) {
            query_starts_[r] = queries_ + r * MAX_HEAD_DIM;
            largest_[r] = -__builtin_inff();
            total_[r] = 0;
            std::memset(sums_ + r * MAX_HEAD_DIM, 0, layout.padded_dim * sizeof(float));
        }
    }

    void set_query(int r, const char* row, int32_t format, int64_t first, float scale) {
        float* to = queries_ + r * MAX_HEAD_DIM;
        const int dim = layout_.head_dim;
        int d = 0;
        for (; d + W <= dim; d += W) store(to + d, load_items(row, format, first + d) * splat(scale));
        for (; d < dim; d++) to[d] = item_at(row, format, first + d) * scale;
        for (; d < padded_inputs<F>(dim); d++) to[d] = 0;
    }

    // Row r sees the positions from first_seen[r] to last_seen[r], both included, as far as they are in [from, to).
    void attend(int from, int to, const int* first_seen, const int* last_seen) {
        for (int chunk = from / SUB * SUB; chunk < to; chunk += CHUNK) {
            const int end = chunk + CHUNK < to ? chunk + CHUNK : to;
            score(chunk, end);
            int seen_from = end, seen_to = chunk;
            for (int r = 0; r < rows_; r++) {
                const int first = first_seen[r] > from ? first_seen[r] : from, last = last_seen[r] < end - 1 ? last_seen[r] : end - 1;
                soften(r, chunk, end, first, last);
                if (first <= last) {
                    seen_from = first < seen_from ? first : seen_from;
                    seen_to = last + 1 > seen_to ? last + 1 : seen_to;
                }
            }
            if (seen_from < seen_to) sum_values(chunk, seen_from < chunk ? chunk : seen_from, seen_to);
        }
    }

    float largest(int r) const { return largest_[r]; }
    float total(int r) const { return total_[r]; }
    float* sums(int r) { return sums_ + r * MAX_HEAD_DIM; }

  private:
    // Heads of a sub-block lie one after another, so the processor's own prefetching follows.
    void score(int chunk, int end) {
        for (int at = chunk; at < end; at += SUB) {
            if (at + SUB < end) ask_for(layout_.sub(blocks_, at + SUB, 0, head_));
            for (int h = 0; h < heads_; h++)
                for (int row = 0; row < head_rows_; row += MAX_ROWS) {
                    const int rows = head_rows_ - row < MAX_ROWS ? head_rows_ - row : MAX_ROWS, first = h * head_rows_ + row;
                    one_block<F>(query_starts_ + first, rows, layout_.sub(blocks_, at, 0, head_ + h), layout_.head_dim,
                                 [&](int m, int, const f32v(&sums)[NV]) {
                                     for (int v = 0; v < NV; v++) store(&scores_[first + m][at - chunk + v * W], sums[v]);
                                 });
                }
        }
        ask_for(layout_.sub(blocks_, chunk, 1, head_));
    }

    // The first lines of what is read next, for it may begin elsewhere.
    static void ask_for(const typename F::Item* sub) {
        for (int line = 0; line < ASKED_LINES; line++) __builtin_prefetch(reinterpret_cast<const char*>(sub) + line * 64);
    }

    // Scores become weights relative to the largest so far; what was summed before is scaled to it.
    void soften(int r, int chunk, int end, int first, int last) {
        float* scores = scores_[r];
        const int width = (end - chunk + W - 1) / W * W;
        const float none = -__builtin_inff();
        for (int i = 0; i < width && chunk + i < first; i++) scores[i] = none;
        for (int i = last + 1 - chunk < 0 ? 0 : last + 1 - chunk; i < width; i++) scores[i] = none;
        f32v largest = splat(largest_[r]);
        for (int i = 0; i < width; i += W) largest = max(load(scores + i), largest);
        float top = largest[0];
        for (int i = 1; i < W; i++) top = largest[i] > top ? largest[i] : top;
        if (top == none) {
            for (int i = 0; i < width; i++) scores[i] = 0;
            return;
        }
        f32v total = {};
        for (int i = 0; i < width; i += W) {
            const f32v score = load(scores + i);
            const i32v is_seen = score != splat(none);  // what is no number counts as seen, and spoils the row
            const f32v weight = select(is_seen, exp_or_none(score - splat(top)), splat(0.0f));
            total += weight;
            store(scores + i, weight);
        }
        const float before = __builtin_expf(largest_[r] - top);
        total_[r] = total_[r] * before + sum(total);
        if (before != 1.0f)
            for (int d = 0; d < layout_.padded_dim; d += W)
                store(sums_ + r * MAX_HEAD_DIM + d, load(sums_ + r * MAX_HEAD_DIM + d) * splat(before));
        largest_[r] = top;
    }

    static f32v exp_or_none(f32v x) { return select(x == x, exp(x), x); }

    void sum_values(int chunk, int from, int to) {
        for (int at = from / SUB * SUB; at < to; at += SUB) {
            const int begin = from > at ? from - at : 0, end = to - at < SUB ? to - at : SUB;
            if (at + SUB < to) ask_for(layout_.sub(blocks_, at + SUB, 1, head_));
            for (int h = 0; h < heads_; h++)
                for (int row = 0; row < head_rows_; row += MAX_ROWS) {
                    const int rows = head_rows_ - row < MAX_ROWS ? head_rows_ - row : MAX_ROWS;
                    add_some_rows(h * head_rows_ + row, rows, layout_.sub(blocks_, at, 1, head_ + h), at - chunk, begin, end);
                }
        }
    }

    void add_some_rows(int row, int rows, const typename F::Item* values, int at, int begin, int end) {
        switch (rows) {
            case 1: return add_rows<1>(row, values, at, begin, end);
            case 2: return add_rows<2>(row, values, at, begin, end);
            case 3: return add_rows<3>(row, values, at, begin, end);
            case 4: return add_rows<4>(row, values, at, begin, end);
            case 5: return add_rows<5>(row, values, at, begin, end);
            case 6: return add_rows<6>(row, values, at, begin, end);
            case 7: if constexpr (MAX_ROWS > 6) return add_rows<7>(row, values, at, begin, end); break;
            case 8: if constexpr (MAX_ROWS > 6) return add_rows<8>(row, values, at, begin, end); break;
        }
    }

    // Positions begin..end-1 of one sub-block, whose weights are from `at` on in the chunk's.
    template <int M> void add_rows(int row, const typename F::Item* values, int at, int begin, int end) {
        const float* weights[M];
        for (int m = 0; m < M; m++) weights[m] = scores_[row + m] + at;
        for (int d = 0; d < layout_.padded_dim; d += BLOCK) {
            f32v sums[M][NV];
            float* to = sums_ + row * MAX_HEAD_DIM + d;
            for (int m = 0; m < M; m++)
                for (int v = 0; v < NV; v++) sums[m][v] = load(to + m * MAX_HEAD_DIM + v * W);
            if (begin == 0 && end == SUB) add_values<F, M>(weights, values + size_t(d) * SUB, 0, SUB, sums);
            else add_values<F, M>(weights, values + size_t(d) * SUB, begin, end, sums);
            for (int m = 0; m < M; m++)
                for (int v = 0; v < NV; v++) store(to + m * MAX_HEAD_DIM + v * W, sums[m][v]);
        }
    }

    const CacheLayout<F>& layout_;
    const int32_t* blocks_;
    const int head_, heads_, head_rows_, rows_;
    const float* query_starts_[UNIT_ROWS];
    float largest_[UNIT_ROWS], total_[UNIT_ROWS];
    alignas(64) float queries_[UNIT_ROWS * MAX_HEAD_DIM];
    alignas(64) float sums_[UNIT_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores_[UNIT_ROWS][CHUNK];
};

// One unit: `tokens` tokens of a span from `token` on, `heads` kv heads from `head` on, positions [from, to). `partial`:
// where the sums of a part go, [query heads][padded_dim + 2]; null: straight into `out`.
struct Unit {
    int span, head, heads, token, tokens, from, to;
    float* partial;
};

template <class F> class AttentionStep {
  public:
    AttentionStep(const Cache& cache, const Spans& spans, const Rows& qkv, int heads, int window, float scale, const Rows& out)
        : layout_(cache), spans_(spans), qkv_(qkv), out_(out), group_(heads / cache.kv_heads), window_(window), scale_(scale),
          tokens_(UNIT_ROWS / group_ > 0 ? UNIT_ROWS / group_ : 1) {}

    void run(int threads) {
        // Where units are plenty, one has several kv heads: their keys lie together, and are read as one stream.
        const int most = UNIT_ROWS / group_ < layout_.kv_heads ? UNIT_ROWS / group_ : layout_.kv_heads;
        heads_ = spans_.count >= 2 * threads && most > 1 ? most : 1;
        plan();
        int next = 0;  // unit
        parallel(threads < num_units_ ? threads : num_units_, [&](Team& team) {
            for (int u = take(next); u < num_units_; u = take(next)) attend(units_[u]);
            team.barrier();
            if (num_partials_ == 0) return;
            int64_t from, to;
            team.share(int64_t(spans_.count) * layout_.kv_heads, from, to);
            for (int64_t i = from; i < to; i++) join(int(i / layout_.kv_heads), int(i % layout_.kv_heads));
        });
    }

  private:
    // The next unit's number, each given once.
    static int take(int& next) { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
    int first_seen(int position) const { return window_ > 0 && position + 1 > window_ ? position + 1 - window_ : 0; }
    bool is_single(int span) const { return spans_.first_row[span + 1] - spans_.first_row[span] == 1; }
    int num_parts(int span) const {
        const int end = spans_.start[span] + 1, first = first_seen(spans_.start[span]) / SUB * SUB;
        return (end - first + PART - 1) / PART;
    }
    size_t partial_items() const { return size_t(group_) * heads_ * (layout_.padded_dim + 2); }

    // Twice the same walk: the number of units, and then the units.
    void plan() {
        num_units_ = num_partials_ = 0;
        each_unit([&](const Unit& unit, bool is_part) {
            num_units_++;
            num_partials_ += is_part;
            (void)unit;
        });
        Scratch& memory = scratch();
        memory.reset(Scratch::bytes_of<Unit>(num_units_) + Scratch::bytes_of<float>(num_partials_ * partial_items()) +
                     Scratch::bytes_of<int>(spans_.count));
        units_ = memory.take<Unit>(num_units_);
        float* partials = memory.take<float>(num_partials_ * partial_items());
        first_unit_ = memory.take<int>(spans_.count);
        int count = 0;
        each_unit([&](const Unit& unit, bool is_part) {
            if (unit.head == 0 && unit.token == 0 && is_first_part(unit)) first_unit_[unit.span] = count;
            units_[count] = unit;
            if (is_part) {
                units_[count].partial = partials;
                partials += partial_items();
            }
            count++;
        });
    }
    bool is_first_part(const Unit& unit) const { return unit.from == first_seen(spans_.start[unit.span] + unit.token) || unit.from == 0; }

    template <class Each> void each_unit(Each each) const {
        for (int s = 0; s < spans_.count; s++) {
            const int rows = spans_.first_row[s + 1] - spans_.first_row[s], start = spans_.start[s];
            if (rows == 1) {
                const int parts = num_parts(s), first = first_seen(start), base = first / SUB * SUB;
                for (int head = 0; head < layout_.kv_heads; head += heads_) {
                    const int heads = layout_.kv_heads - head < heads_ ? layout_.kv_heads - head : heads_;
                    for (int p = 0; p < parts; p++) {
                        const int from = p == 0 ? first : base + p * PART, to = base + (p + 1) * PART;
                        each(Unit{s, head, heads, 0, 1, from, to < start + 1 ? to : start + 1, nullptr}, parts > 1);
                    }
                }
                continue;
            }
            for (int head = 0; head < layout_.kv_heads; head++)
                for (int token = 0; token < rows; token += tokens_) {
                    const int tokens = rows - token < tokens_ ? rows - token : tokens_;
                    each(Unit{s, head, 1, token, tokens, first_seen(start + token), start + token + tokens, nullptr}, false);
                }
        }
    }

    void attend(const Unit& u) {
        const int head_rows = u.tokens * group_, rows = head_rows * u.heads;
        int first[UNIT_ROWS], last[UNIT_ROWS];
        AttentionUnit<F> unit(layout_, spans_.blocks + spans_.first_block[u.span], u.head, u.heads, head_rows);
        // Row r is of the unit's kv head r / head_rows, its token token_of(r) and its query head query_head(r).
        auto token_of = [&](int r) { return u.token + r % head_rows / group_; };
        auto query_head = [&](int r) { return (u.head + r / head_rows) * group_ + r % group_; };
        for (int r = 0; r < rows; r++) {
            const char* row = row_at(qkv_, spans_.first_row[u.span] + token_of(r));
            unit.set_query(r, row, qkv_.format, int64_t(query_head(r)) * layout_.head_dim, scale_);
            last[r] = spans_.start[u.span] + token_of(r);
            first[r] = first_seen(last[r]);
        }
        unit.attend(u.from, u.to, first, last);
        for (int r = 0; r < rows; r++) {
            if (u.partial != nullptr) {
                float* to = u.partial + size_t(r) * (layout_.padded_dim + 2);
                to[0] = unit.largest(r);
                to[1] = unit.total(r);
                std::memcpy(to + 2, unit.sums(r), layout_.padded_dim * sizeof(float));
            } else {
                write(u.span, token_of(r), query_head(r), unit.sums(r), 1.0f / unit.total(r));
            }
        }
    }

    void join(int span, int head) {
        if (!is_single(span)) return;
        const int parts = num_parts(span);
        if (parts == 1) return;
        const Unit* units = units_ + first_unit_[span] + head / heads_ * parts;
        for (int g = 0; g < group_; g++) {
            float largest = -__builtin_inff(), total = 0;
            auto part = [&](int p) { return units[p].partial + size_t(head % heads_ * group_ + g) * (layout_.padded_dim + 2); };
            for (int p = 0; p < parts; p++) largest = part(p)[0] > largest || part(p)[0] != part(p)[0] ? part(p)[0] : largest;
            float sums[MAX_HEAD_DIM] = {};
            for (int p = 0; p < parts; p++) {
                const float scale = __builtin_expf(part(p)[0] - largest);
                total += scale * part(p)[1];
                for (int d = 0; d < layout_.head_dim; d++) sums[d] += scale * part(p)[2 + d];
            }
            write(span, 0, head * group_ + g, sums, 1.0f / total);
        }
    }

    void write(int span, int token, int head, const float* sums, float scale) {
        char* row = row_at(out_, spans_.first_row[span] + token);
        const int64_t first = int64_t(head) * layout_.head_dim;
        int d = 0;
        for (; d + W <= layout_.head_dim; d += W) store_items(row, out_.format, first + d, load(sums + d) * splat(scale));
        for (; d < layout_.head_dim; d++) set_item(row, out_.format, first + d, sums[d] * scale);
    }

    const CacheLayout<F> layout_;
    const Spans& spans_;
    const Rows &qkv_, &out_;
    const int group_, window_;
    const float scale_;
    const int tokens_;
    int heads_ = 1;  // kv heads of a unit of single tokens
    int num_units_ = 0, num_partials_ = 0;
    Unit* units_ = nullptr;
    int* first_unit_ = nullptr;
};

inline void attend(const Cache* cache, const Spans* spans, const Rows* qkv, int32_t heads, int32_t window, float scale,
                   const Rows* out, int32_t threads) {
    if (cache->format == BF16) AttentionStep<Bf16>(*cache, *spans, *qkv, heads, window, scale, *out).run(threads);
    else AttentionStep<Fp32>(*cache, *spans, *qkv, heads, window, scale, *out).run(threads);
}

}  // namespace MR_ISA
